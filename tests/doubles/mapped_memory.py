"""A card whose memory is a CPU tensor: maps, unmaps and runs out as kernels.jit.mapped_memory does.

New memory holds garbage; what is unmapped is spoilt, and touching what is not mapped is an error.
"""

from __future__ import annotations

import torch

GARBAGE = 0xAB
GRANULARITY = 2048


class FakeMemory:
    """`room`: bytes that may be mapped at once. `syncs` counts waits for the device."""

    def __init__(self, room: int = 1 << 40, granularity: int = GRANULARITY) -> None:
        self.granularity = granularity
        self.room = room
        self.syncs = 0
        self.spaces: dict[int, torch.Tensor] = {}
        self.mapped: dict[int, int] = {}
        self.allowed: set[int] = set()
        self._next = 1 << 40

    @property
    def mapped_bytes(self) -> int:
        """Bytes in use over all pools."""
        return sum(self.mapped.values())

    def reserve(self, size: int) -> int:
        assert size > 0
        assert size % self.granularity == 0
        address, self._next = self._next, self._next + 2 * size
        self.spaces[address] = torch.full((size,), GARBAGE, dtype=torch.uint8)
        return address

    def free(self, address: int, size: int) -> None:
        assert self.spaces.pop(address).numel() == size
        assert not any(address <= place < address + size for place in self.mapped)

    def map(self, address: int, size: int) -> None:
        assert address % self.granularity == 0
        assert address not in self.mapped
        if self.mapped_bytes + size > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory: the fake card is full")
        self._view(address, size).fill_(GARBAGE)
        self.mapped[address] = size

    def allow(self, address: int, size: int) -> None:
        places = self._whole_mappings(address, size)
        assert not self.allowed & places
        self.allowed |= places

    def unmap(self, address: int, size: int) -> None:
        for place in self._whole_mappings(address, size):
            self._view(place, self.mapped.pop(place)).fill_(GARBAGE)
            self.allowed.discard(place)

    def synchronize(self) -> None:
        self.syncs += 1

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        end = address + size
        reach = sum(
            max(0, min(end, place + self.mapped[place]) - max(address, place))
            for place in self.allowed
        )
        assert reach == size, "a tensor over memory that is not there"
        return self._view(address, size)

    def _whole_mappings(self, address: int, size: int) -> set[int]:
        found = {place for place in self.mapped if address <= place < address + size}
        assert sum(self.mapped[place] for place in found) == size
        return found

    def _view(self, address: int, size: int) -> torch.Tensor:
        start = max(base for base in self.spaces if base <= address)
        return self.spaces[start][address - start : address - start + size]
