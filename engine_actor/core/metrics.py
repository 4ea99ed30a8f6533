"""The engine's own metrics registry and its Prometheus text form.

Knows no Ray, no HTTP and no network. One thread writes, any thread may read: a reader copies a
family's cells in one step and may miss the newest recordings, never see a broken one. The families
are given as one table (`metric_table.ENGINE_METRICS` for the engine), so that each name, help text
and unit stands in one place. Recording costs a few hundred nanoseconds and no lock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from engine_actor.core.metric_table import ENGINE_METRICS, Definition

Labels = tuple[str, ...]


class _Histogram:
    """Cells of one label combination: one count per bucket, the last for everything above."""

    __slots__ = ("counts", "total")

    def __init__(self, n_buckets: int) -> None:
        self.counts = [0] * (n_buckets + 1)
        self.total = 0.0


class Metrics:
    """Counters, gauges and histograms of one process.

    A family without labels exists from the start at 0, so that a dashboard sees it before the first
    event. Raises KeyError for a name that is not in the table and ValueError where the number of
    label values does not fit: both are bugs of ours.
    """

    def __init__(self, table: Sequence[Definition] = ENGINE_METRICS) -> None:
        self._table = {definition.name: definition for definition in table}
        if len(self._table) != len(table):
            raise ValueError("two metric families share a name")
        self._values: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {}
        for definition in table:
            if definition.kind == "histogram":
                cells: dict[Labels, _Histogram] = {}
                self._histograms[definition.name] = cells
                if not definition.labels:
                    cells[()] = _Histogram(len(definition.buckets))
            else:
                self._values[definition.name] = {} if definition.labels else {(): 0.0}

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Raise a counter by `amount` (not negative), or move a gauge."""
        cells = self._values[name]
        try:
            cells[labels] += amount
        except KeyError:
            self._check(name, labels)
            cells[labels] = amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        cells = self._values[name]
        if labels not in cells:
            self._check(name, labels)
        cells[labels] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Record one value in a histogram."""
        cells = self._histograms[name]
        cell = cells.get(labels)
        if cell is None:
            self._check(name, labels)
            cell = cells[labels] = _Histogram(len(self._table[name].buckets))
        cell.counts[bisect_left(self._table[name].buckets, value)] += 1
        cell.total += value

    def value(self, name: str, *labels: str) -> float:
        """Present value of a counter or gauge; 0 where nothing was recorded."""
        return self._values[name].get(labels, 0.0)

    def count(self, name: str, *labels: str) -> int:
        """How many values a histogram has seen."""
        cell = self._histograms[name].get(labels)
        return sum(cell.counts) if cell else 0

    @property
    def table(self) -> tuple[Definition, ...]:
        """The families, in order."""
        return tuple(self._table.values())

    def text(self) -> str:
        """Everything in the Prometheus text format, version 0.0.4, in the table's order."""
        lines: list[str] = []
        for definition in self._table.values():
            lines.append(f"# HELP {definition.name} {_escape_help(definition)}")
            lines.append(f"# TYPE {definition.name} {definition.kind}")
            lines.extend(f"{name} {_number(value)}" for name, value in self._samples(definition))
        return "\n".join(lines) + "\n"

    def snapshot(self) -> dict[str, float]:
        """Everything as {sample name with labels: value}; histograms as their _bucket, _sum and
        _count samples. The same names as in text().
        """
        return {
            name: value
            for definition in self._table.values()
            for name, value in self._samples(definition)
        }

    def _samples(self, definition: Definition) -> Iterable[tuple[str, float]]:
        if definition.kind == "histogram":
            # sorted() copies the items in one step under the interpreter lock, so the writer may
            # add a label combination at any time.
            for labels, cell in sorted(self._histograms[definition.name].items()):
                yield from _histogram_samples(definition, labels, list(cell.counts), cell.total)
        else:
            for labels, value in sorted(self._values[definition.name].items()):
                yield definition.name + _labels(definition.labels, labels), value

    def _check(self, name: str, labels: Labels) -> None:
        wanted = self._table[name].labels
        if len(labels) != len(wanted):
            raise ValueError(f"{name} takes labels {wanted}, got {labels}")


def _histogram_samples(
    definition: Definition, labels: Labels, counts: list[int], total: float
) -> Iterable[tuple[str, float]]:
    seen = 0
    for bound, count in zip((*definition.buckets, math.inf), counts, strict=True):
        seen += count
        names, values = (*definition.labels, "le"), (*labels, _number(bound))
        yield f"{definition.name}_bucket{_labels(names, values)}", seen
    yield f"{definition.name}_sum{_labels(definition.labels, labels)}", total
    yield f"{definition.name}_count{_labels(definition.labels, labels)}", seen


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escape_help(definition: Definition) -> str:
    words = f"{definition.help} ({definition.unit})" if definition.unit else definition.help
    return words.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    if value == -math.inf:
        return "-Inf"
    if value != value:
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
