"""One cell on and on: is it as fast and as small at its end as it was at first? Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memory_use import growth
from results import make_row, percentile

SLOWER = 0.10
"""How much slower the last quarter may be than the first."""
MOST_GROWTH_MIB = 1.0
"""Of torch's memory over the run."""


@dataclass
class Steady:
    """One cell on and on: when each repetition ended, what it gave, what torch held after it."""

    at: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def add(self, at: float, rate: float, tpot: float, memory: float) -> None:
        for values, value in zip(
            (self.at, self.rates, self.tpots, self.memory), (at, rate, tpot, memory), strict=True
        ):
            values.append(value)

    def rows(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        series = {
            ("tokens_per_second", "tokens/s"): self.rates,
            ("tpot_p95_s", "s"): self.tpots,
            ("device_mib", "MiB"): self.memory,
            ("ended_at", "s"): self.at,
        }
        found = [make_row(case, *name, values, 1) for name, values in series.items() if values]
        return found

    def wrong(self) -> list[str]:
        """Slower or larger at its end."""
        if not self.rates:
            return ["no repetition ended in time"]
        quarter = max(1, len(self.rates) // 4)
        before = percentile(self.rates[:quarter], 0.5)
        after = percentile(self.rates[-quarter:], 0.5)
        slower = after < (1 - SLOWER) * before
        lines = [f"{before:.1f} -> {after:.1f} tokens/s"] * slower
        if growth(self.memory) > MOST_GROWTH_MIB:
            lines.append(f"torch holds {growth(self.memory):.1f} MiB more at the end")
        return lines


def spread(values: Sequence[float]) -> float:
    """The largest distance from the median, as a share of it."""
    median = percentile(values, 0.5)
    return max(abs(value - median) for value in values) / median
