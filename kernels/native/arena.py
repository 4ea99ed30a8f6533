"""Memory for re-laid weights: few large mappings on huge pages, filled in the order of loading.

A decoded token reads every weight once, far more than the CPU's page tables can map in pages of
4 KiB; on huge pages the same read took a seventh less time (docs/log.md). Where the system has
none this is plain memory.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

CHUNK_BYTES = 32 << 20
ALIGNMENT = 64
TAIL_BYTES = 8192
"""Left free behind the last weight: the kernels fetch ahead of what they read."""


class Arena:
    """Gives out pieces of the mapping in use; a mapping lives as long as a piece of it."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk: mmap.mmap | None = None
        self._used = 0
        self._lock = threading.Lock()

    def place(self, data: torch.Tensor) -> torch.Tensor:
        """A copy of u8 data, aligned to a cache line. Raises OSError where memory is out."""
        size = data.numel()
        with self._lock:
            if self._chunk is None or self._used + size + TAIL_BYTES > len(self._chunk):
                self._chunk = _mapping(max(self._chunk_bytes, size + TAIL_BYTES))
                self._used = 0
            chunk, start = self._chunk, self._used
            self._used = -(-(start + size) // ALIGNMENT) * ALIGNMENT
        if size == 0:
            return data.clone()
        piece = torch.frombuffer(chunk, dtype=torch.uint8, count=size, offset=start)
        return piece.view(data.shape).copy_(data)


def _mapping(size: int) -> mmap.mmap:
    """Anonymous memory, on huge pages where the system grants them."""
    chunk = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without them says EINVAL
            chunk.madvise(advice)
    return chunk


WEIGHTS = Arena()
"""Where all layers of a process lie."""
