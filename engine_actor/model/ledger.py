"""The memory ledger of one card: what torch holds, what is mapped beside it, and the cap on both.

torch counts its own allocations only, and the KV pool's memory is not among them. With a cap the
two are held together: whoever grows first leaves less to the other. The CUDA context, loaded
kernels and other processes are not in the cap; plans leave room for them (memory_plan.py).
Knows no tensor; the calls to torch are behind Allocator.
"""

from __future__ import annotations

from typing import Protocol

import torch

MIB = 1 << 20


class Allocator(Protocol):
    """torch's caching allocator and its card. All in bytes."""

    @property
    def total(self) -> int:
        """Memory of the card."""
        ...

    def card_free(self) -> int:
        """What the driver would still give to anybody."""
        ...

    def reserved(self) -> int:
        """Taken from the card by torch, in use or kept for later."""
        ...

    def empty_cache(self) -> None:
        """Give back what torch keeps for later."""
        ...

    def set_limit(self, limit: int) -> None:
        """torch refuses to reserve more than this from now on."""
        ...


class CardLedger:
    """Thread-bound like the engine that grows its pool. `mapped`: bytes taken beside torch; `cap`:
    most that torch and they may take together, None for what the card has.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self.cap: int | None = None
        self.mapped = 0

    def hold(self, cap: int | None) -> None:
        """Set or lift the cap. What is over it already is not taken away."""
        self.cap = cap
        if cap is None:
            self._allocator.set_limit(self._allocator.total)
        else:
            self._tell_torch()

    def free(self) -> int:
        """Bytes that torch or the KV pool could still take."""
        on_card = self._allocator.card_free()
        return on_card if self.cap is None else max(0, min(on_card, self._below_cap()))

    @property
    def outside(self) -> int:
        """Taken on the card by neither: CUDA contexts, loaded kernels, other processes."""
        taken = self._allocator.total - self._allocator.card_free()
        return max(0, taken - self._allocator.reserved() - self.mapped)

    @property
    def held(self) -> int:
        """Taken by torch and by what is mapped."""
        return self._allocator.reserved() + self.mapped

    def before_mapping(self, size: int) -> None:
        """Add `size` bytes. Raises torch.OutOfMemoryError where they are not there even once torch
        has given back what it keeps for later.
        """
        if size > self.free():
            self._allocator.empty_cache()
        left = self.free()
        if size > left:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: the KV pool asks for {size} bytes, {left} are left"
                + ("" if self.cap is None else f" of {self.cap}")
            )
        self.mapped += size
        self._tell_torch()

    def after_unmapping(self, size: int) -> None:
        """Take `size` bytes off it."""
        self.mapped -= size
        self._tell_torch()

    def _below_cap(self) -> int:
        assert self.cap is not None
        return self.cap - self._allocator.reserved() - self.mapped

    def _tell_torch(self) -> None:
        if self.cap is not None:
            self._allocator.set_limit(max(0, self.cap - self.mapped))
