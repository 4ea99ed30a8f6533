"""How many blocks the pool has: the base, a limit's part of it, and what live requests need.

Knows who must be preempted for a smaller pool; does not preempt.
"""

from __future__ import annotations

from engine_actor.core.budget import limited_blocks
from engine_actor.core.kv_manager import KVManager
from engine_actor.core.limits import require_positive, tokens_needed
from engine_actor.core.params import InvalidParam
from engine_actor.core.roster import Roster
from engine_actor.core.sequence import Sequence


class PoolCapacity:
    """Elastic capacity. A limit never shrinks the pool below what the largest live request needs,
    or that one could not end; the rest of the shrink follows when it has. The base is what there
    is: no live request changes that.
    """

    def __init__(self, roster: Roster, kv: KVManager) -> None:
        self._roster = roster
        self._kv = kv
        self._base_blocks = kv.capacity
        self._fraction = 1.0
        self._shrunk = False
        self.too_small = False
        """A live request may need more than the base; those that come later cannot."""

    @property
    def target_blocks(self) -> int:
        """Blocks the pool is meant to have."""
        return limited_blocks(self._base_blocks, self._fraction)

    def set_fraction(self, fraction: float) -> None:
        """Leave that part of the base. Raises InvalidParam outside (0, 1]."""
        if not 0.0 < fraction <= 1.0:
            raise InvalidParam("kv_fraction", f"must be in (0, 1], got {fraction}")
        self._fraction = fraction
        self._fit()

    def set_base(self, n_blocks: int) -> None:
        """Change the base itself."""
        require_positive("n_blocks", n_blocks)
        self._base_blocks = n_blocks
        self.too_small = self._largest_need() > n_blocks
        self._fit()

    def take_displaced(self) -> list[Sequence]:
        """Finish a shrink that had to wait, and name the running sequences that hold blocks above
        the capacity, last in rank first. Each is named once, so the caller must preempt it.
        """
        if self._kv.capacity != self.target_blocks:
            self._fit()
        if not self._shrunk:
            return []
        self._shrunk = False
        return [seq for seq in reversed(tuple(self._roster.running)) if self._kv.holds_tail(seq)]

    def _fit(self) -> None:
        wanted = self.target_blocks
        if wanted < self._kv.capacity:
            largest = self._largest_need()
            self.too_small = self.too_small or largest > self._base_blocks
            wanted = min(self._base_blocks, max(wanted, min(largest, self._kv.capacity)))
        if wanted < self._kv.capacity:
            self._shrunk = True
        if wanted != self._kv.capacity:
            self._kv.resize(wanted)

    def _largest_need(self) -> int:
        """Blocks of the live request that needs most."""
        needs = (tokens_needed(seq) for seq in self._roster.live.values())
        return self._kv.blocks_for(max(needs, default=1))
