"""Injected out-of-memory faults, for drills and tests. Empty in production.

A fault is raised as a verb of a work begins, exactly where the real error would come from. Knows
stages, trace ids and row counts; knows no works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from configs.schema import FaultRule


@dataclass(slots=True)
class _Armed:
    """A rule and how often it may still fire; None: without end."""

    rule: FaultRule
    left: int | None

    def fits(self, stage: str, trace_ids: Sequence[str], rows: int) -> bool:
        rule = self.rule
        return (
            self.left != 0
            and rule.stage == stage
            and (rule.request is None or rule.request in trace_ids)
            and (rule.min_rows is None or rows >= rule.min_rows)
        )


class FaultPlan:
    """Rules with the number of times each may still fire."""

    def __init__(self, rules: Iterable[FaultRule] = ()) -> None:
        self._armed: list[_Armed] = []
        for rule in rules:
            self.add(rule)
        self.fired = 0

    def add(self, rule: FaultRule) -> None:
        """Arm one more rule, in the middle of a drill."""
        self._armed.append(_Armed(rule, None if rule.times == "always" else rule.times))

    def clear(self) -> None:
        """Disarm everything."""
        self._armed.clear()

    def __bool__(self) -> bool:
        return bool(self._armed)

    def hit(self, stage: str, trace_ids: Sequence[str], rows: int) -> None:
        """Raise torch.OutOfMemoryError where a rule fits this stage of a work of `rows` rows that
        serves `trace_ids`. A rule with a request and min_rows wants both."""
        for armed in self._armed:
            if armed.fits(stage, trace_ids, rows):
                if armed.left is not None:
                    armed.left -= 1
                self.fired += 1
                raise torch.OutOfMemoryError(f"injected at {stage} of {rows} rows")
