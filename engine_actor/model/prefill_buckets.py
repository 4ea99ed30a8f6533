"""Which forwards of prompts share a shape: rows rounded up, keys of all prompts together rounded
up.

Only those that a fast GPU computes in about the time that its host needs to launch them one by one:
there a graph pays, and padding costs less than it saves. Pure ints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
KEYS = (1024, 4096)
"""Of a forward; how many of them are there is read on the device, so few sizes do."""
BURST_ROWS = (768, 1024, 1280, 1536, 1792, 2048)
BURST_KEYS = 8192
"""Of the larger forwards, next to which a key more costs nothing: four for each row, as many as
prompts that are launched one by one may have together in one call of attention."""
LONGEST = 1023
"""Rows of a prompt in a larger forward: longer ones have a faster attention where it may ask the
host for their lengths (kernels/attention/cuda_prompt.py)."""


@dataclass(frozen=True, slots=True)
class PrefillBucket:
    """rows: of new tokens there is room for. keys: of all prompts together, new ones included."""

    rows: int
    keys: int


@dataclass(frozen=True, slots=True)
class PrefillBuckets:
    """All combinations of `rows` and `keys`, both ascending, and behind them each of `burst_rows`
    with `burst_keys`. sequences: prompts that any holds.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    sequences: int
    burst_rows: tuple[int, ...] = ()
    burst_keys: int = 0

    @classmethod
    def up_to(cls, max_rows: int, max_context: int, sequences: int) -> PrefillBuckets:
        """The largest of each are what `max_rows` and so many contexts can be, at most what there
        is above.
        """
        most_keys = sequences * max_context
        small = cls(_up_to(ROWS, max_rows), _up_to(KEYS, most_keys), sequences)
        if max_rows <= ROWS[-1]:
            return small
        burst = _up_to(BURST_ROWS, max_rows)
        return replace(small, burst_rows=burst, burst_keys=min(most_keys, BURST_KEYS))

    def of(self, rows: int, keys: int, sequences: int, longest: int) -> PrefillBucket | None:
        """The smallest with room; None where there is none. A prompt's keys include its rows, of
        which any has `longest` at most.
        """
        if not 0 < sequences <= self.sequences or rows > self.most_rows:
            return None
        if rows > self.rows[-1]:
            if keys > self.burst_keys or longest > LONGEST:
                return None
            return PrefillBucket(_least(self.burst_rows, rows), self.burst_keys)
        if keys > self.keys[-1]:
            return None
        return PrefillBucket(_least(self.rows, rows), _least(self.keys, keys))

    @property
    def most_rows(self) -> int:
        """Of any."""
        return (self.rows + self.burst_rows)[-1]

    @property
    def most_keys(self) -> int:
        """Of any."""
        return max(self.keys[-1], self.burst_keys)

    def __iter__(self) -> Iterator[PrefillBucket]:
        """The largest first."""
        for rows in reversed(self.burst_rows):
            yield PrefillBucket(rows, self.burst_keys)
        for keys in reversed(self.keys):
            for rows in reversed(self.rows):
                yield PrefillBucket(rows, keys)

    def __len__(self) -> int:
        return len(self.rows) * len(self.keys) + len(self.burst_rows)


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Those below `most`, and it or the last of them."""
    return (*(size for size in sizes[:-1] if size < most), min(most, sizes[-1]))


def _least(sizes: tuple[int, ...], wanted: int) -> int:
    return sizes[bisect_left(sizes, wanted)]
