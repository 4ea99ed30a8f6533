#!/usr/bin/env python3
"""Draw a result of bench_prefill_gemm.py: time against rows, and what a shared card costs.

    scripts/plot_prefill_gemm.py prefill-gemm.json --output prefill.svg --overlap overlap.svg

Either picture may be left out.

Needs matplotlib (extra `bench`). Measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Points = list[tuple[float, float]]
Shape = tuple[int, int]

DENSE_BITS = 16


def times(record: Record, bits: int) -> dict[Shape, dict[str, Points]]:
    """(n, k) -> backend -> (rows, TFLOP/s) in rising order of rows: packed weights of so many bits,
    and dense ones where packed ones were timed too. A control stands alone and is left out.
    """
    timed = [row for row in record["rows"] if row["metric"] == "time"]
    packed = {_place(row) for row in timed if row["case"]["bits"] == bits}
    found: dict[Shape, dict[str, Points]] = {}
    for row in timed:
        if row["case"]["bits"] in (bits, DENSE_BITS) and _place(row) in packed:
            n, k, m = _place(row)
            points = found.setdefault((n, k), {}).setdefault(row["case"]["backend"], [])
            points.append((m, 2 * m * n * k / row["median"] / 1e6))
    return {
        shape: {name: sorted(points) for name, points in backends.items()}
        for shape, backends in found.items()
    }


def _place(row: Record) -> tuple[int, int, int]:
    return row["case"]["n"], row["case"]["k"], row["case"]["m"]


def shares(record: Record) -> dict[tuple[str, int], dict[str, Points]]:
    """(backend, rows of a chunk) -> metric -> (multiprocessors of the prefill, ms)."""
    found: dict[tuple[str, int], dict[str, Points]] = {}
    for row in record["rows"]:
        case = row["case"]
        if "max_ctas" in case:
            metrics = found.setdefault((case["backend"], case["m"]), {})
            metrics.setdefault(row["metric"], []).append((case["max_ctas"], row["median"]))
    return {
        key: {metric: sorted(points) for metric, points in metrics.items()}
        for key, metrics in found.items()
    }


def plot_times(record: Record, bits: int, path: Path) -> None:
    """Rows against TFLOP/s, a panel a shape."""
    pyplot = _pyplot()
    panels = times(record, bits)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.4 * len(panels), 3.6), squeeze=False, constrained_layout=True
    )
    for axis, shape in zip(axes[0], sorted(panels, key=math.prod), strict=True):
        for index, (name, points) in enumerate(sorted(panels[shape].items())):
            axis.plot(*zip(*points, strict=True), "o-", color=f"C{index}", ms=3, label=name)
        ticks = sorted({m for points in panels[shape].values() for m, _ in points})
        axis.set(title=f"{shape[0]} x {shape[1]}, W{bits}", xscale="log", ylim=(0, None))
        axis.set_xticks(ticks, [str(m) for m in ticks])
        axis.minorticks_off()
        axis.set(xlabel="rows", ylabel="TFLOP/s")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_shares(record: Record, path: Path) -> None:
    """Multiprocessors left to the prefill against a decode step beside it, and the prefill's own
    time, each over its time alone and unlimited.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    for index, ((backend, m), metrics) in enumerate(sorted(shares(record).items())):
        label = f"{backend}, chunk {m}"
        whole_card = metrics["prefill_alone"][-1][1]
        for axis, beside, alone in (
            (axes[0], metrics["decode_step_beside_prefill"], metrics["decode_step_alone"][-1][1]),
            (axes[1], metrics["prefill_beside_decode"], whole_card),
        ):
            ratios = [(share, ms / alone) for share, ms in beside]
            axis.plot(*zip(*ratios, strict=True), "o-", color=f"C{index}", label=label)
    axes[0].set(ylabel="decode step, times its own alone")
    axes[1].set(ylabel="prefill, times its own alone on the whole card")
    for axis in axes:
        axis.set(xlabel="multiprocessors that the prefill may use", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the pictures are written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--bits", type=int, choices=(3, 4), default=4)
    parser.add_argument("--output", type=Path, help="TFLOP/s against rows")
    parser.add_argument("--overlap", type=Path, help="prefill beside decode")
    args = parser.parse_args(argv)
    record = json.loads(args.result.read_text(encoding="utf-8"))
    if args.output is not None:
        plot_times(record, args.bits, args.output)
    if args.overlap is not None:
        plot_shares(record, args.overlap)
    return 0


if __name__ == "__main__":
    sys.exit(main())
