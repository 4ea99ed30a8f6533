"""How the ints of a batch reach the device: in one copy that the host does not wait for.

A copy from memory that the system may page out makes the host wait for the whole stream, so that
nothing could be launched ahead. Knows bytes; knows no batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

import torch

from engine_actor import ops

Numbers = tuple[torch.Tensor, torch.Tensor]
"""The same ints as i64[n] and i32[m]."""
RING = 6
"""Copies on their way at once: two works for each of two open steps, and room for retries."""
_LEAST_BYTES = 1 << 16
ROW_BYTES = 32
"""Of a prompt's row: id, position and slot, and its part of a block table."""


class Copied(Protocol):
    """A point in the stream behind a copy."""

    def synchronize(self) -> None:
        """Let the host wait until the copy is done."""
        ...


class Staging(Protocol):
    """Brings ints to the device."""

    def __call__(self, wide: array[int], narrow: bytearray) -> Numbers:
        """`wide`: typecode q; `narrow`: i32. Not to be changed afterwards."""
        ...


def host_numbers(wide: array[int], narrow: bytearray) -> Numbers:
    """On the CPU they are there: views of the arrays."""
    return (
        torch.frombuffer(wide, dtype=torch.int64),
        torch.frombuffer(narrow, dtype=torch.int32),
    )


class PinnedStaging:
    """A ring of page-locked buffers. One is written again only after its last copy is done.

    `record` marks a point in the current stream. rows: of the largest chunk, for which there is
    room from the start: a buffer that grows keeps everybody waiting for a millisecond or two.
    `pin`: False in tests without a device.
    """

    def __init__(
        self, device: torch.device, record: Callable[[], Copied], rows: int = 0, pin: bool = True
    ) -> None:
        self._device = device
        self._record = record
        self._fetch = ops.Fetch(device) if pin and device.type == "cuda" else None
        self._memory = ops.page_locked(device if pin else torch.device("cpu"))
        least = max(_LEAST_BYTES, ROW_BYTES * rows)
        self._buffers = [self._memory.lease(least) for _ in range(RING)]
        self._copied: list[Copied | None] = [None] * RING
        self._next = 0

    def __call__(self, wide: array[int], narrow: bytearray) -> Numbers:
        """Views of one new tensor on the device. The host waits only where the ring is full."""
        n_wide, n_narrow = 8 * len(wide), len(narrow)
        index = self._next
        self._next = (index + 1) % RING
        copied = self._copied[index]
        if copied is not None:
            copied.synchronize()
        buffer = self._buffers[index].memory
        if len(buffer) < n_wide + n_narrow:
            self._buffers[index] = self._memory.lease(2 * (n_wide + n_narrow))
            buffer = self._buffers[index].memory
        memory: memoryview = buffer.numpy().data
        memory[:n_wide] = memoryview(wide).cast("B")
        memory[n_wide : n_wide + n_narrow] = narrow
        there = self._send(buffer[: n_wide + n_narrow])
        self._copied[index] = self._record()
        return there[:n_wide].view(torch.int64), there[n_wide:].view(torch.int32)

    def _send(self, staged: torch.Tensor) -> torch.Tensor:
        if self._fetch is not None:
            return self._fetch(staged)
        return staged.to(self._device, non_blocking=True, copy=True)
