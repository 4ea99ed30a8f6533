"""Figures in the tables of a page, and what their records have for them. Measures nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.house_rules.sources import ROOT

DOCS = ROOT / "docs"
DAY = "2026-11-30-"
FIGURE = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

Row = list[str]
Found = Iterator[tuple[str, float | list[float]]]
"""A cell, and what its record has for the figures in it."""


@cache
def record(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))


def row_of(name: str, metric: str, **case: Any) -> dict[str, Any]:
    """The one row of a record with this metric and this case; rows that play another role (a
    control) are none."""
    found = [
        row
        for row in record(name)["rows"]
        if row["metric"] == metric
        and not row["case"].get("role")
        and all(row["case"].get(key) == wanted for key, wanted in case.items())
    ]
    assert len(found) == 1, f"{name}: {len(found)} rows of {metric} {case}"
    return found[0]


def median(name: str, metric: str, **case: Any) -> float:
    return row_of(name, metric, **case)["median"]


def table(page: str, heading: str, *first: str) -> list[Row]:
    """The table below a heading whose head begins with these cells: its rows by cells. An empty
    first cell is the one above it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0].splitlines()
    start = next(at for at, line in enumerate(lines) if cells_of(line)[: len(first)] == [*first])
    rows: list[Row] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = cells_of(line)
        cells[0] = cells[0] or (rows[-1][0] if rows else "")
        rows.append(cells)
    return rows


def cells_of(line: str) -> Row:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def is_rounded(shown: str, value: float) -> bool:
    decimals = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "")) - value) <= 0.5 * 10**-decimals + 1e-9


def wrong(found: Found) -> list[str]:
    """Cells with another figure than the record's, or with more or fewer of them."""
    lines = []
    for cell, expected in found:
        values = expected if isinstance(expected, list) else [expected]
        shown = FIGURE.findall(cell)
        if len(shown) != len(values) or not all(map(is_rounded, shown, values)):
            lines.append(f"{cell!r}: the record has {', '.join(f'{v:.5g}' for v in values)}")
    return lines
