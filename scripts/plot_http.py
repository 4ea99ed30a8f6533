#!/usr/bin/env python3
"""Draw results of bench_http.py: one line a server, so that ours and a peer's lie in one picture.

    scripts/plot_http.py ours.json peer.json --output compare.png

Needs matplotlib (extra `bench`). Measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (
    ("output_tokens_per_second", ("median",), "tokens/s", 1.0),
    ("ttft", ("median", "p95"), "time to first token, ms", 1000.0),
    ("itl", ("median", "p95", "p99"), "time between events, ms", 1000.0),
)
STYLES = {"median": "-", "p95": "--", "p99": ":"}


def points(record: Mapping[str, Any], metric: str, field: str) -> tuple[list[int], list[float]]:
    """Concurrencies and values of one metric, in rising order."""
    found = sorted(
        (row["case"]["concurrency"], row[field])
        for row in record["rows"]
        if row["metric"] == metric
    )
    return [x for x, _ in found], [y for _, y in found]


def plot(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the PNG with throughput, TTFT and ITL over concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(13, 4), constrained_layout=True)
    for axis, (metric, fields, label, scale) in zip(axes, PANELS, strict=True):
        for index, record in enumerate(records):
            name = record["switches"].get("label") or record["switches"].get("url", "")
            for field in fields:
                x, y = points(record, metric, field)
                axis.plot(
                    x,
                    [value * scale for value in y],
                    STYLES[field],
                    color=f"C{index}",
                    marker="o",
                    label=f"{name} {field}".strip(),
                )
        axis.set_xlabel("streams at once")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the named result files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    plot([json.loads(path.read_text(encoding="utf-8")) for path in args.results], args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
