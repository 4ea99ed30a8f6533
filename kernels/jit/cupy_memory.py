"""CuPy's memory taken from torch: one allocator, one count, one cap over both.

The engine allocates nothing through CuPy; whoever does in this process is held by the same limit.
"""

from __future__ import annotations

from typing import Any

import torch


def route_to_torch(cupy: Any) -> None:
    """Make the imported module `cupy` allocate from torch's caching allocator from now on."""
    routed = cupy.cuda.PythonFunctionAllocator(_allocate, _free)
    cupy.cuda.set_allocator(routed.malloc)


def _allocate(size: int, device: int) -> int:
    """Raises torch.OutOfMemoryError."""
    return int(torch.cuda.caching_allocator_alloc(size, device))


def _free(address: int, device: int) -> None:
    torch.cuda.caching_allocator_delete(address)
