"""Which decode batches share a shape: rows rounded up, the longest context rounded up.

Every batch of a bucket runs with the same kernels on the same grids, so one captured graph serves
them all, and a replay gives the bits of the same bucket run without a graph. Pure ints.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SHORTEST = 512
"""Keys of the smallest bucket; each larger one has twice as many."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """rows: sequences there is room for. context: keys that any of them may have."""

    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class DecodeBuckets:
    """All combinations of `rows` and `contexts`, both ascending."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def up_to(cls, max_rows: int, max_context: int) -> DecodeBuckets:
        """The largest of each are the limits themselves, rows at most ROWS' last."""
        most = min(max_rows, ROWS[-1])
        contexts = [SHORTEST]
        while contexts[-1] < max_context:
            contexts.append(2 * contexts[-1])
        return cls(
            (*(rows for rows in ROWS if rows < most), most),
            (*contexts[:-1], max_context),
        )

    def of(self, rows: int, longest: int) -> Bucket | None:
        """The smallest with room for `rows` sequences of up to `longest` keys; None where there is
        none.
        """
        if rows < 1 or rows > self.rows[-1] or longest > self.contexts[-1]:
            return None
        return Bucket(
            self.rows[bisect_left(self.rows, rows)],
            self.contexts[bisect_left(self.contexts, longest)],
        )

    def __len__(self) -> int:
        return len(self.rows) * len(self.contexts)
