"""Sequences kept in their order of service: first come first served, priorities, ageing.

Knows no blocks and no budget. The scheduler keeps both its waiting and its running sequences here,
so who is served first and who is preempted first follow from one order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine_actor.core.sequence import Sequence

Rank = tuple[float, int]


def rank_of(arrived: float, priority: int, ageing_s: float, order: int) -> Rank:
    """The place of a request in the order of service; smaller is served first.

    A request gains one priority level for each `ageing_s` seconds it has lived. As all age at the
    same rate, comparing aged priorities is comparing `arrived + priority * ageing_s`, which never
    changes. A fixed total order is also what rules out a livelock: the first of it is never
    preempted. `order` counts arrivals and breaks ties.
    """
    return (arrived + priority * ageing_s, order)


def aged_level(sequence: Sequence, now: float, ageing_s: float) -> int:
    """Priority level after ageing: one smaller for each whole `ageing_s` since arrival."""
    return sequence.priority - int((now - sequence.arrived) / ageing_s)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class RankedSequences:
    """Sequences sorted by their rank. Insert and remove cost O(log n) and one short move."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and self._find(sequence) is not None

    @property
    def last(self) -> Sequence:
        """The youngest of the lowest priority. Raises IndexError when empty."""
        return self._items[-1]

    def add(self, sequence: Sequence) -> None:
        """Put in its place. Ranks are unique, so a second add of the same is a bug: ValueError."""
        if self._find(sequence) is not None:
            raise ValueError(f"{sequence.key} is here already")
        insort(self._items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take out. Raises KeyError if it is not here."""
        index = self._find(sequence)
        if index is None:
            raise KeyError(sequence.key)
        del self._items[index]

    def _find(self, sequence: Sequence) -> int | None:
        index = bisect_left(self._items, sequence.rank, key=_rank)
        if index < len(self._items) and self._items[index] is sequence:
            return index
        return None
