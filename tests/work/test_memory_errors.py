"""Errors of driver, runtime and our own launches: no memory, device lost, or neither."""

from __future__ import annotations

import pytest
import torch

from engine_actor import ops
from engine_actor.work.memory_errors import is_fatal, is_out_of_memory

NEITHER = (False, False)
NO_MEMORY = (True, False)
LOST = (False, True)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError("CUDA error: out of memory"), NO_MEMORY),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED in cublasCreate"),
            NO_MEMORY,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), NO_MEMORY),
        (ops.LaunchError("loading the cubin of f: CUDA_ERROR_OUT_OF_MEMORY", 2), NO_MEMORY),
        (ops.LaunchError("f: CUDA_ERROR_ILLEGAL_ADDRESS", 700), LOST),
        (ops.LaunchError("f: CUDA_ERROR_LAUNCH_FAILED", 719), LOST),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), LOST),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), LOST),
        (ops.LaunchError("f: argument 0 is on cpu, the current device is cuda:0"), NEITHER),
        (ValueError("out of memory"), NEITHER),
    ],
)
def test_which_is_which(error: Exception, kind: tuple[bool, bool]) -> None:
    assert (is_out_of_memory(error), is_fatal(error)) == kind
