#!/usr/bin/env python3
"""Draw a result of bench_memory_sweep.py: tokens a second and p95 TPOT over the context.

    scripts/plot_memory_sweep.py memory_sweep.json --output docs/memory_sweep.svg

A column for each KV type and chunk; a line for each number of streams ends at the longest context
that fits. Needs matplotlib (extra `bench`). Measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from draw_result import Record, draw_result

Lines = dict[int, dict[int, dict[str, float]]]
"""streams -> context -> metric -> median, in tokens a second and ms."""

METRICS = {"tokens_per_second": ("tokens a second", 1.0), "tpot_p95_s": ("p95 TPOT, ms", 1e3)}


def lines_of(record: Record) -> dict[str, Lines]:
    """By KV type and chunk, in the record's order; the steady run is left out."""
    found: dict[str, Lines] = {}
    for row in record["rows"]:
        case = row["case"]
        if row["metric"] in METRICS and "steady" not in case:
            lines = found.setdefault(f"KV {case['kv']}, chunk {case['chunk']}", {})
            cell = lines.setdefault(case["streams"], {}).setdefault(case["context"], {})
            cell[row["metric"]] = METRICS[row["metric"]][1] * row["median"]
    return found


def plot(record: Record, path: Path) -> None:
    """Two rows of panels, one column for each engine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = lines_of(record)
    size = (max(5, 3.2 * len(found)), 6)
    figure, panels = pyplot.subplots(
        2, len(found), figsize=size, squeeze=False, sharey="row", constrained_layout=True
    )
    for column, (name, lines) in enumerate(found.items()):
        panels[0][column].set_title(name, fontsize=9)
        panels[1][column].set_xlabel("tokens of each sequence")
        for (metric, (label, _)), row in zip(METRICS.items(), panels, strict=True):
            axis = row[column]
            for streams, cells in sorted(lines.items()):
                contexts = sorted(cells)
                values = [cells[context][metric] for context in contexts]
                axis.plot(contexts, values, marker="o", markersize=3, label=f"{streams} at once")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
            if column == 0:
                axis.set_ylabel(label)
    panels[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def table(record: Record) -> str:
    """The same as a Markdown table; a cell is tokens a second / p95 TPOT in ms."""
    rows = ["| engine | streams | context: tokens/s / p95 TPOT ms |", "|---|---|---|"]
    for name, lines in lines_of(record).items():
        for streams, cells in sorted(lines.items()):
            shown = ", ".join(
                f"{context}: {cell['tokens_per_second']:,.0f} / {cell['tpot_p95_s']:.2f}"
                for context, cell in sorted(cells.items())
            )
            rows.append(f"| {name} | {streams} | {shown} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the named result and print its table."""
    return draw_result(argv, __doc__, plot, table)


if __name__ == "__main__":
    sys.exit(main())
