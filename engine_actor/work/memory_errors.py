"""Which exceptions mean "no memory", and which mean that the device is lost. Pure functions."""

from __future__ import annotations

import torch

_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUDA out of memory")
_LOST = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "an illegal memory access")


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's and Python's own, and for the CPU allocator's plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def is_fatal(error: BaseException) -> bool:
    """True for a device error that is not about memory: every later call would fail as well."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
