"""Injected out-of-memory faults, for drills and tests. Empty in production.

A fault is raised as a verb of a work begins, exactly where the real error would come from. Knows
stages, trace ids and row counts; knows no works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from configs.schema import FaultRule


class FaultPlan:
    """Rules with the number of times each may still fire."""

    def __init__(self, rules: Iterable[FaultRule] = ()) -> None:
        self._rules = [[rule, None if rule.times == "always" else rule.times] for rule in rules]
        self.fired = 0

    def __bool__(self) -> bool:
        return bool(self._rules)

    def hit(self, stage: str, trace_ids: Sequence[str], rows: int) -> None:
        """Raise torch.OutOfMemoryError where a rule fits this stage of a work of `rows` rows that
        serves `trace_ids`. A rule with a request and min_rows wants both."""
        for entry in self._rules:
            rule, left = entry
            if left == 0 or rule.stage != stage:
                continue
            if rule.request is not None and rule.request not in trace_ids:
                continue
            if rule.min_rows is not None and rows < rule.min_rows:
                continue
            if left is not None:
                entry[1] = left - 1
            self.fired += 1
            raise torch.OutOfMemoryError(f"injected at {stage} of {rows} rows")
