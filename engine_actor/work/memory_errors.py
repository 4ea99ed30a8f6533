"""Which exceptions mean "no memory", and which mean that the device is lost. Pure functions."""

from __future__ import annotations

import torch

from engine_actor import ops

_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA out of memory",
    # The runtime's own words, where no allocator of torch's was asked: a graph, a stream, an event.
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_LOST = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "an illegal memory access")


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's and Python's own, for the CPU allocator's plain RuntimeError, and where the
    CUDA runtime, a library of its or the driver under our own launches says so.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, ops.LaunchError):
        return error.is_out_of_memory
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def is_fatal(error: BaseException) -> bool:
    """True for a device error that is not about memory: every later call would fail as well. A
    launch that we refuse ourselves (an argument on another device) is the caller's own error.
    """
    if is_out_of_memory(error):
        return False
    if isinstance(error, ops.LaunchError):
        return error.status != 0
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
