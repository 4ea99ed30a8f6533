#!/usr/bin/env python3
"""Draw a result of bench_tpot_jitter.py: what a long prompt costs the streams, by mode and chunk.

    scripts/plot_insertion.py insertion.json --output docs/insertion.svg

Needs matplotlib (extra `bench`). Measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from draw_result import Record, draw_result

Cells = dict[str, dict[int, dict[str, float]]]
"""mode -> chunk -> metric -> median in ms."""

LINES = (
    ("undisturbed_itl_p50_s", "ITL p50 undisturbed", "0.75"),
    ("itl_p50_s", "ITL p50", "C0"),
    ("itl_p99_s", "ITL p99", "C1"),
    ("max_itl_s", "ITL max", "C3"),
)
WIDTH = 0.8


def cells(record: Record) -> Cells:
    """Medians over the repetitions, in the record's order of modes."""
    found: Cells = {}
    for row in record["rows"]:
        if row["unit"] == "s":
            case = row["case"]
            chunks = found.setdefault(case["mode"], {})
            chunks.setdefault(case["chunk_tokens"], {})[row["metric"]] = 1e3 * row["median"]
    return found


def plot(record: Record, path: Path) -> None:
    """Two panels: the streams' ITL while the prompt comes in, and the prompt's TTFT."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = cells(record)
    names = [f"{mode}\n{chunk}" for mode, chunks in found.items() for chunk in sorted(chunks)]
    values = [chunks[chunk] for chunks in found.values() for chunk in sorted(chunks)]
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(max(7, 0.75 * len(names)), 7), constrained_layout=True, sharex=True
    )
    places = range(len(names))
    width = WIDTH / len(LINES)
    for index, (metric, label, colour) in enumerate(LINES):
        at = [place - WIDTH / 2 + width * (index + 0.5) for place in places]
        above.bar(at, [value[metric] for value in values], width, label=label, color=colour)
    above.set_ylabel("ms between tokens")
    above.set_yscale("log")
    above.legend(fontsize=8, ncols=len(LINES))
    half = WIDTH / 2
    for index, (metric, label) in enumerate((("ttft_alone_s", "alone"), ("ttft_s", "beside"))):
        at = [place - half / 2 + half * index for place in places]
        below.bar(at, [value[metric] for value in values], half, label=label, color=f"C{index}")
    below.set_ylabel("TTFT of the prompt, ms")
    below.legend(fontsize=8)
    below.set_xticks(list(places), names, fontsize=7)
    below.set_xlabel("how the device is shared, prompt tokens a step")
    for axis in (above, below):
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def table(record: Record) -> str:
    """The same as a Markdown table, ms."""
    lines = [
        "| mode | chunk | ITL before | p50 | p99 | max | p95 TPOT | TTFT | TTFT alone |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    metrics = [metric for metric, _, _ in LINES] + ["tpot_p95_s", "ttft_s", "ttft_alone_s"]
    for mode, chunks in cells(record).items():
        for chunk, cell in sorted(chunks.items()):
            shown = " | ".join(f"{cell[metric]:.2f}" for metric in metrics)
            lines.append(f"| {mode} | {chunk} | {shown} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the named result and print its table."""
    return draw_result(argv, __doc__, plot, table)


if __name__ == "__main__":
    sys.exit(main())
