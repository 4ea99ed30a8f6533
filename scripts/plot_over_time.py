#!/usr/bin/env python3
"""Draw a long run over its minutes: a soak, or the steady run of a memory sweep.

    scripts/plot_over_time.py docs/results/gpu_soak.json --output docs/soak.png

A panel for the rate, one for memory as it changed since the first period, and one for the KV pool,
which grows as it is used. Needs matplotlib (extra `bench`). Measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from draw_result import Record, draw_result
from results import percentile

MEMORY = ("device_memory", "host_memory", "reserved_memory", "other_memory", "device_mib")
POOL = "kv_pool"


def series_of(record: Record) -> tuple[list[float], dict[str, list[float]]]:
    """(minutes, metric -> values) of the run: a soak's periods are taken as of equal length."""
    rows = [row for row in record["rows"] if row["case"].get("steady") or not row["case"]]
    found = {row["metric"]: row["raw"] for row in rows}
    if "ended_at" in found:
        return [at / 60 for at in found.pop("ended_at")], found
    count = len(found["tokens_per_second"])
    length = record["switches"]["counts"]["seconds"] / 60 / count
    return [length * (i + 1) for i in range(count)], found


def plot(record: Record, path: Path) -> None:
    """Panels one above the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes, found = series_of(record)
    count = 2 + (POOL in found)
    figure, panels = pyplot.subplots(
        count, 1, figsize=(7, 2.5 * count), sharex=True, constrained_layout=True
    )
    rate, memory = panels[:2]
    rate.plot(minutes, found["tokens_per_second"], linewidth=1)
    rate.set_ylim(bottom=0)
    rate.set_ylabel("tokens a second")
    for name in MEMORY:
        if name in found:
            first = found[name][0]
            values = [value - first for value in found[name]]
            memory.plot(minutes, values, linewidth=1, label=f"{name} ({first:,.0f} MiB at first)")
    memory.set_ylabel("MiB more than at first")
    memory.legend(fontsize=7)
    if POOL in found:
        panels[2].plot(minutes, found[POOL], linewidth=1)
        panels[2].set_ylim(bottom=0)
        panels[2].set_ylabel("KV pool, MiB")
    panels[-1].set_xlabel("minutes")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def table(record: Record) -> str:
    """A line a quantity: first, median, last."""
    lines = [
        f"{name}: first {values[0]:,.4g}, median {percentile(values, 0.5):,.4g}, "
        f"last {values[-1]:,.4g}, {len(values)} values"
        for name, values in series_of(record)[1].items()
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the named result and print its lines."""
    return draw_result(argv, __doc__, plot, table)


if __name__ == "__main__":
    sys.exit(main())
