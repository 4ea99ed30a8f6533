"""Is a text the one that the same prompt gives alone? Token for token, but for near ties.

Rows of a batch are rounded otherwise than a row alone, so two tokens whose logits nearly meet may
change places. How far apart rounding moves the two best is measured on the way, at every position
that both texts share; a first difference is excused where the gap alone is within that bound.
Nothing after it is compared. At most one position in a hundred may be excused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine_actor.core.plan import TokenLogprobs
from engine_runs import Request

MOST_EXCUSED = 0.01
LEAST_BOUND = 1e-3
"""Logits; what fp32 on a CPU leaves between two orders of summation is far below."""


@dataclass(frozen=True)
class Comparison:
    """Texts compared so far. gaps: of first differences, alone. bound: the largest change of a gap
    between the two runs, where both chose the same token."""

    texts: int = 0
    positions: int = 0
    gaps: tuple[float, ...] = ()
    bound: float = LEAST_BOUND

    def wrong(self) -> list[str]:
        """What no rounding explains, a line each."""
        lines = [
            f"a text left the one alone at a gap of {gap:.4f}, rounding moves {self.bound:.4f}"
            for gap in self.gaps
            if gap > self.bound
        ]
        if len(self.gaps) > MOST_EXCUSED * self.positions:
            lines.append(f"{len(self.gaps)} of {self.positions} positions had to be excused")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For the result."""
        return {
            "texts": self.texts,
            "positions": self.positions,
            "excused": len(self.gaps),
            "gaps": list(self.gaps),
            "bound": self.bound,
        }

    def __str__(self) -> str:
        same = f"{self.texts - len(self.gaps)} of {self.texts} texts equal those alone"
        return f"{same}, {len(self.gaps)} near ties in {self.positions} positions"


def compare(before: Comparison, ours: Request, alone: Request) -> Comparison:
    """`before` with one more text. Both requests asked for the two best logprobs."""
    positions, bound = 0, before.bound
    pairs = zip(ours.logprobs, alone.logprobs, strict=True)
    for (mine, theirs), token, wanted in zip(pairs, ours.tokens, alone.tokens, strict=True):
        positions += 1
        if token != wanted:
            gaps = (*before.gaps, gap(theirs))
            return _added(before, positions, bound, gaps)
        bound = max(bound, abs(gap(mine) - gap(theirs)))
    return _added(before, positions, bound, before.gaps)


def summed(texts: Sequence[Mapping[str, Any]]) -> Comparison:
    """Several Comparison.as_dict() of one model as one: what any of them measured of rounding holds
    for all, since a gap as wide as the widest that one of them saw may meet the others too.
    """
    return Comparison(
        texts=sum(each["texts"] for each in texts),
        positions=sum(each["positions"] for each in texts),
        gaps=tuple(gap for each in texts for gap in each["gaps"]),
        bound=max((each["bound"] for each in texts), default=LEAST_BOUND),
    )


def _added(before: Comparison, positions: int, bound: float, gaps: Sequence[float]) -> Comparison:
    return replace(
        before,
        texts=before.texts + 1,
        positions=before.positions + positions,
        bound=bound,
        gaps=tuple(gaps),
    )


def gap(position: TokenLogprobs) -> float:
    """Between the two best logits: that of their logprobs."""
    (_, first), (_, second) = position.top[:2]
    return first - second
