"""Which forwards of prompts share a shape: rows rounded up, keys of all prompts together rounded
up.

Only those that a fast GPU computes in less time than its host needs to launch them one by one:
there a graph pays, and padding costs less than it saves. Pure ints.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
KEYS = (1024, 4096)
"""Of a forward; how many of them are there is read on the device, so few sizes do."""


@dataclass(frozen=True, slots=True)
class PrefillBucket:
    """rows: of new tokens there is room for. keys: of all prompts together, new ones included."""

    rows: int
    keys: int


@dataclass(frozen=True, slots=True)
class PrefillBuckets:
    """All combinations of `rows` and `keys`, both ascending. sequences: prompts that any holds."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    sequences: int

    @classmethod
    def up_to(cls, max_rows: int, max_context: int, sequences: int) -> PrefillBuckets:
        """The largest of each are what a chunk and so many contexts can be, at most ROWS' and KEYS'
        last.
        """
        most_rows = min(max_rows, ROWS[-1])
        most_keys = min(sequences * max_context, KEYS[-1])
        return cls(
            (*(rows for rows in ROWS if rows < most_rows), most_rows),
            (*(keys for keys in KEYS if keys < most_keys), most_keys),
            sequences,
        )

    def of(self, rows: int, keys: int, sequences: int) -> PrefillBucket | None:
        """The smallest with room; None where there is none. A prompt's keys include its rows."""
        if not 0 < sequences <= self.sequences or rows > self.rows[-1] or keys > self.keys[-1]:
            return None
        return PrefillBucket(
            self.rows[bisect_left(self.rows, rows)], self.keys[bisect_left(self.keys, keys)]
        )

    def __len__(self) -> int:
        return len(self.rows) * len(self.keys)
