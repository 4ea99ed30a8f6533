#!/usr/bin/env python3
"""Draw results of bench_linear.py: time over the roofline's floor against rows, a panel a shape.

    scripts/plot_linear.py linear.json peers.json --bits 4 --output linear-w4.png

Files after the first are other runs: their lines are dashed, and floors are the first file's.
--contenders keeps only those named.
Needs matplotlib (extra `bench`). Measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Shape = tuple[int, int]


def floors(record: Record, bits: int) -> dict[tuple[int, int, int], float]:
    """us by (n, k, m): what reading `bits` a weight, or multiplying, takes at least."""
    return {
        (row["case"]["n"], row["case"]["k"], row["case"]["m"]): row["case"]["floor_us"]
        for row in record["rows"]
        if row["case"].get("bits") == bits and "floor_us" in row["case"]
    }


def lines(record: Record, bits: int, shape: Shape) -> dict[str, list[tuple[int, float]]]:
    """(m, us) of each contender that takes weights of so many bits, or dense ones."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in record["rows"]:
        case = row["case"]
        if (case.get("n"), case.get("k")) != shape or case.get("bits") not in (bits, 16):
            continue
        if not str(case.get("role", "")).startswith("control"):
            found.setdefault(case["contender"], []).append((case["m"], row["median"]))
    return {name: sorted(points) for name, points in found.items()}


def over_floor(
    records: Sequence[Record], bits: int, shape: Shape
) -> Iterator[tuple[str, int, list[tuple[int, float]]]]:
    """(contender, which record, (m, time over the first record's floor)) of one shape."""
    least = floors(records[0], bits)
    for index, record in enumerate(records):
        for name, points in lines(record, bits, shape).items():
            kept = [(m, us / least[*shape, m]) for m, us in points if (*shape, m) in least]
            if kept:
                yield name, index, kept


def plot(
    records: Sequence[Record], bits: int, path: Path, wanted: Collection[str] | None = None
) -> None:
    """Write the picture; the format is that of the file's name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters
    least = floors(records[0], bits)
    shapes = sorted({(n, k) for n, k, _ in least}, key=math.prod)
    across = min(3, len(shapes))
    down = -(-len(shapes) // across)
    figure, grid = pyplot.subplots(
        down, across, figsize=(4.2 * across, 3.4 * down), squeeze=False, constrained_layout=True
    )
    axes = grid.flat[: len(shapes)]
    for axis in grid.flat[len(shapes) :]:
        axis.remove()
    colours: dict[str, int] = {}
    for axis, shape in zip(axes, shapes, strict=True):
        for name, index, points in over_floor(records, bits, shape):
            if wanted is not None and name not in wanted:
                continue
            colour = pyplot.get_cmap("tab20")(colours.setdefault(name, len(colours)) * 7 % 20)
            label, style = (name, "-") if index == 0 else (f"{name} (other run)", "--")
            axis.plot(*zip(*points, strict=True), style, color=colour, label=label)
        axis.set(title=f"{shape[0]} x {shape[1]}, W{bits}")
        scale(axis, sorted({m for n, k, m in least if (n, k) == shape}))
    labelled = [zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes]
    handles = {label: handle for pairs in labelled for handle, label in pairs}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def scale(axis: Any, rows: Sequence[int]) -> None:
    """Both scales of a panel and their labels."""
    from matplotlib import ticker

    rows = rows[:: 1 + len(rows) // 9]  # labels that have room
    axis.set(xscale="log", yscale="log", xlabel="rows", ylabel="time over floor", ylim=(1, None))
    axis.set_xticks(rows, [str(m) for m in rows])
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    axis.grid(alpha=0.3)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the picture is written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, help="ours first, then other runs")
    parser.add_argument("--bits", type=int, choices=(3, 4), default=4)
    parser.add_argument("--contenders", nargs="+", help="all, if not given")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    records = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    plot(records, args.bits, args.output, args.contenders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
