"""The pool of KV blocks: ids, reference counts, the free list.

Knows no tokens, no sequences and no tensors: a block is a number. A block is in one of four states:
free, held (reference count above 0), parked (count 0, kept by the prefix cache) or gone (its id is
at or above the capacity and nobody holds it).
"""

from __future__ import annotations

import heapq


class BlockPool:
    """Blocks 0..capacity-1. The lowest free id goes out first: runs stay contiguous, and the tail
    empties by itself so that the pool can shrink. Blocks from `_fresh` to the capacity are free and
    in no list: a heap of a large pool's would take milliseconds to give out a long prompt's.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a pool needs at least one block, got {capacity}")
        self.capacity = capacity
        self._references = [0] * capacity
        self._free: list[int] = []
        self._fresh = 0
        self._is_free = bytearray(b"\x01" * capacity)

    @property
    def n_free(self) -> int:
        """Blocks that take() can give out now."""
        return len(self._free) + self.capacity - self._fresh

    def references(self, block: int) -> int:
        """How many holders `block` has."""
        return self._references[block]

    def is_free(self, block: int) -> bool:
        """True where `block` is in the free list."""
        return bool(self._is_free[block])

    @property
    def extent(self) -> int:
        """The smallest n such that every held or parked block is below n: what the KV tensors must
        still cover after a shrink.
        """
        for block in range(len(self._references) - 1, -1, -1):
            if self._references[block] or (block < self.capacity and not self._is_free[block]):
                return block + 1
        return 0

    def take(self) -> int:
        """Give out the lowest free block with one reference. Raises IndexError where none is."""
        if self._free or self._fresh == self.capacity:
            block = heapq.heappop(self._free)
        else:
            block = self._fresh
            self._fresh += 1
        self._is_free[block] = 0
        self._references[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        """As so many take(), at once where none of them was ever used before."""
        end = self._fresh + count
        if self._free or end > self.capacity:
            return [self.take() for _ in range(count)]
        blocks = list(range(self._fresh, end))
        self._is_free[self._fresh : end] = bytes(count)
        self._references[self._fresh : end] = [1] * count
        self._fresh = end
        return blocks

    def hold(self, block: int) -> None:
        """Add a reference to a held or parked block. Raises ValueError on a free one."""
        if self._is_free[block]:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._references[block] += 1

    def drop(self, block: int) -> bool:
        """Remove a reference; True where it was the last: the block is now parked, and the caller
        either keeps it so or calls put_back(). Raises ValueError on a block that nobody holds.
        """
        if self._references[block] < 1:
            raise ValueError(f"block {block} has no reference to drop")
        self._references[block] -= 1
        return self._references[block] == 0

    def put_back(self, block: int) -> None:
        """Return a parked block to the free list, or let it go where a shrink has passed it by.
        Raises ValueError on a double free or a block still held.
        """
        if self._references[block] or self._is_free[block]:
            raise ValueError(f"block {block} is held or free already")
        if block < self.capacity:
            self._is_free[block] = 1
            heapq.heappush(self._free, block)

    def resize(self, capacity: int) -> None:
        """Change the capacity. Held blocks above a smaller one stay valid and leave when dropped;
        the caller has put back every parked block there before.
        """
        if capacity < 1:
            raise ValueError(f"a pool needs at least one block, got {capacity}")
        old, self.capacity = self.capacity, capacity
        if capacity < old:
            for block in range(capacity, old):
                self._is_free[block] = 0
            self._free = [block for block in self._free if block < capacity]
            heapq.heapify(self._free)
            self._fresh = min(self._fresh, capacity)
            return
        missing = capacity - len(self._references)
        if missing > 0:
            self._references.extend([0] * missing)
            self._is_free.extend(bytes(missing))
        if not any(self._references[old:capacity]):
            self._is_free[old:capacity] = b"\x01" * (capacity - old)
            return
        # Those that are held since before a shrink lie between the free ones.
        for block in range(self._fresh, old):
            heapq.heappush(self._free, block)
        self._fresh = capacity
        for block in range(old, capacity):
            if not self._references[block]:
                self.put_back(block)

    def check(self) -> None:
        """Raise AssertionError where the free list, its flags and the counts disagree."""
        listed = {*self._free, *range(self._fresh, self.capacity)}
        assert len(listed) == self.n_free, "a block is in the free list twice"
        flagged = {block for block, free in enumerate(self._is_free) if free}
        assert listed == flagged, f"free list and flags differ: {listed ^ flagged}"
        for block in listed:
            assert 0 <= block < self.capacity, f"free block {block} is above the capacity"
            assert self._references[block] == 0, f"free block {block} is held"
        assert min(self._references) >= 0, "a reference count is negative"
