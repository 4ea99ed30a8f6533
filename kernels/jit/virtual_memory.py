"""Arrays at fixed addresses that grow and shrink: address space reserved once, memory mapped under
it as it is needed.

A pool holds several arrays of one number of blocks, one behind the other over `capacity` blocks
each. Memory comes in granules (2 MiB); one granule may lie under the end of an array and the start
of the next, so a full pool takes no more than its bytes, rounded up once. Growth copies nothing and
moves nothing, so what a CUDA graph has captured stays true. Knows bytes, not what they mean; the
driver's calls are those of mapped_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from kernels.jit.driver import LaunchError

ALIGNMENT = 256
"""Bytes on which an array starts: what cudaMalloc promises and vector loads need."""
MOST_GRANULES = 4096
"""A large pool takes larger granules, so that mapping all of it stays a matter of a second."""


class MemoryDriver(Protocol):
    """The driver's calls for one device. Sizes and addresses in bytes, multiples of granularity."""

    @property
    def granularity(self) -> int: ...

    def reserve(self, size: int) -> int: ...

    def free(self, address: int, size: int) -> None: ...

    def map(self, address: int, size: int) -> None:
        """Put new memory under [address, address + size). Raises torch.OutOfMemoryError."""
        ...

    def allow(self, address: int, size: int) -> None: ...

    def unmap(self, address: int, size: int) -> None: ...

    def synchronize(self) -> None: ...

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """u8[size] over the memory at `address`; keeps `owner` alive."""
        ...


class VirtualPool:
    """Arrays of 0..capacity blocks. block_bytes: of one block of each array.

    before_mapping is told how many bytes are about to be taken and may raise
    torch.OutOfMemoryError; after_unmapping how many were given back.
    """

    def __init__(
        self,
        block_bytes: Sequence[int],
        capacity: int,
        memory: MemoryDriver,
        before_mapping: Callable[[int], None] = lambda size: None,
        after_unmapping: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Raises LaunchError where the driver has no address space left for it."""
        self.capacity = capacity
        self.n_blocks = 0
        self._block_bytes = tuple(block_bytes)
        self._memory = memory
        self._before, self._after = before_mapping, after_unmapping
        self._starts, total = array_starts(block_bytes, capacity)
        self.granule = granule_for(total, memory.granularity)
        self._size = max(1, -(-total // self.granule)) * self.granule
        self._mapped: set[int] = set()
        self._address = memory.reserve(self._size)

    @property
    def mapped_bytes(self) -> int:
        """Memory taken now."""
        return len(self._mapped) * self.granule

    def address(self, index: int) -> int:
        """Where array `index` starts, for good."""
        return self._address + self._starts[index]

    def resize(self, n_blocks: int) -> None:
        """Map what n_blocks blocks of every array need and unmap the rest, after the device has
        come to rest. New blocks hold whatever was there: the caller clears them.

        Raises torch.OutOfMemoryError, and nothing has changed then; ValueError past the capacity.
        """
        if not 0 <= n_blocks <= self.capacity:
            raise ValueError(f"{n_blocks} blocks in a pool of {self.capacity}")
        wanted = self._granules(n_blocks)
        missing, spare = sorted(wanted - self._mapped), sorted(self._mapped - wanted)
        if missing:
            self._take(missing)
        if spare:
            self._memory.synchronize()
            self._give(spare)
        self.n_blocks = n_blocks

    def tensor(self, index: int) -> torch.Tensor:
        """Array `index` as it is now, u8[n_blocks * its block's bytes]. A tensor of a larger pool
        must not be read after a shrink.
        """
        size = self.n_blocks * self._block_bytes[index]
        return self._memory.tensor(self.address(index), size, self)

    def close(self) -> None:
        """Give memory and addresses back. Tensors over it must be gone."""
        if not self._size:
            return
        if self._mapped:
            self._memory.synchronize()
            self._give(sorted(self._mapped))
        self._memory.free(self._address, self._size)
        self._size = 0

    def __del__(self) -> None:
        try:
            self.close()
        except (AttributeError, LaunchError, TypeError):
            # Half made, or the process is ending and the driver has gone first.
            return

    def _granules(self, n_blocks: int) -> set[int]:
        found: set[int] = set()
        for start, each in zip(self._starts, self._block_bytes, strict=True):
            if n_blocks * each:
                last = (start + n_blocks * each - 1) // self.granule
                found.update(range(start // self.granule, last + 1))
        return found

    def _take(self, granules: Sequence[int]) -> None:
        size = len(granules) * self.granule
        self._before(size)
        taken: list[int] = []
        try:
            for number in granules:
                self._memory.map(self._place(number), self.granule)
                taken.append(number)
            for first, count in _runs(granules):
                self._memory.allow(self._place(first), count * self.granule)
        except BaseException:
            for number in taken:
                self._memory.unmap(self._place(number), self.granule)
            self._after(size)
            raise
        self._mapped.update(granules)

    def _give(self, granules: Sequence[int]) -> None:
        for first, count in _runs(granules):
            self._memory.unmap(self._place(first), count * self.granule)
        self._mapped.difference_update(granules)
        self._after(len(granules) * self.granule)

    def _place(self, granule: int) -> int:
        return self._address + granule * self.granule


def array_starts(block_bytes: Sequence[int], capacity: int) -> tuple[list[int], int]:
    """Offset of each array in a pool of so many blocks, and the bytes of all of them."""
    starts, total = [], 0
    for each in block_bytes:
        starts.append(total)
        total += -(-each * capacity // ALIGNMENT) * ALIGNMENT
    return starts, total


def granule_for(total: int, granularity: int) -> int:
    """Bytes mapped at a time: the driver's least, and more where there would be too many."""
    return granularity * max(1, -(-total // (MOST_GRANULES * granularity)))


def full_bytes(block_bytes: Sequence[int], capacity: int, granularity: int) -> int:
    """Memory that a pool takes when it is full."""
    total = array_starts(block_bytes, capacity)[1]
    granule = granule_for(total, granularity)
    return -(-total // granule) * granule


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each unbroken run of sorted numbers."""
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count
