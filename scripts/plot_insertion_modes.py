#!/usr/bin/env python3
"""Draw a result of bench_insertion.py: what a long prompt costs the streams against its own wait.

    scripts/plot_insertion_modes.py insertion.json --output insertion.png

Left: time to the prompt's first token against the streams' longest time between two tokens, a point
a case, with its worst repetition; the dashed lines are the goals. Right: p50, p99 and maximum.
Needs matplotlib (extra `bench`). Measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draw_result import Record, draw_result

ITL = {"itl_p50_s": "p50", "itl_p99_s": "p99", "max_itl_s": "max"}
AIM_ITL, REJECT_ITL, AIM_TTFT, REJECT_TTFT = 4.0, 8.0, 150.0, 200.0
VLLM_ITL, VLLM_TTFT = (22.0, 30.0), (105.0, 126.0)
"""ms, another run on such a card: vLLM 0.26, W4, its default budget of 2,048 tokens."""
MS = 1e3


def cases(record: Record) -> dict[str, dict[str, Record]]:
    """Label of a case -> metric -> its row, in the order in which they were measured."""
    found: dict[str, dict[str, Record]] = {}
    for row in record["rows"]:
        found.setdefault(label(row["case"]), {})[row["metric"]] = row
    return found


def label(case: Mapping[str, Any]) -> str:
    """As in "two_streams_capped 2048, 100 SMs, slice 256"."""
    parts = [f"{case['mode']} {case['chunk_tokens']}"]
    if case["max_ctas"]:
        parts.append(f"{case['max_ctas']} SMs")
    if case["slice_tokens"]:
        parts.append(f"slice {case['slice_tokens']}")
    return ", ".join(parts)


def plot(record: Record, path: Path) -> None:
    """Both panels into one picture."""
    pyplot = _pyplot()
    found = cases(record)
    figure, axes = pyplot.subplots(
        1, 2, figsize=(13, 0.27 * len(found) + 2.4), constrained_layout=True
    )
    modes = list(dict.fromkeys(row["case"]["mode"] for row in record["rows"]))
    _trade(axes[0], found, modes)
    _spread(axes[1], found, modes)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _trade(axis: Any, found: Mapping[str, Mapping[str, Record]], modes: Sequence[str]) -> None:
    for name, metrics in found.items():
        itl, ttft = metrics["max_itl_s"], metrics["ttft_s"]
        case = itl["case"]
        x, y = MS * ttft["median"], MS * itl["median"]
        axis.errorbar(
            x,
            y,
            yerr=[[0], [MS * itl["max"] - y]],
            fmt="s" if case["slice_tokens"] else "o",
            color=f"C{modes.index(case['mode'])}",
            ms=5,
            lw=0.8,
        )
        text = name.removeprefix(case["mode"]).strip()
        axis.annotate(text, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axis.plot(*zip(*[(t, i) for t in VLLM_TTFT for i in VLLM_ITL], strict=True), "kx", ms=5)
    for index, mode in enumerate(modes):
        axis.plot([], [], "o", color=f"C{index}", label=mode)
    axis.plot([], [], "ks", ms=4, label="by ranges of layers")
    axis.plot([], [], "kx", label="vLLM 0.26 W4, another run")
    for aim, reject, line in (
        (AIM_ITL, REJECT_ITL, axis.axhline),
        (AIM_TTFT, REJECT_TTFT, axis.axvline),
    ):
        line(aim, color="green", ls="--", lw=0.8)
        line(reject, color="red", ls="--", lw=0.8)
    axis.set(xscale="log", yscale="log", xlabel="time to the long prompt's first token, ms")
    axis.set(ylabel="longest time between two tokens of a stream, ms")
    _number(axis.xaxis, axis.yaxis)
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3, which="both")


def _spread(axis: Any, found: Mapping[str, Mapping[str, Record]], modes: Sequence[str]) -> None:
    for place, metrics in enumerate(found.values()):
        color = f"C{modes.index(metrics['max_itl_s']['case']['mode'])}"
        values = [MS * metrics[metric]["median"] for metric in ITL]
        axis.plot([values[0], values[-1]], [place, place], color=color, lw=2)
        for value, marker in zip(values, "|d>", strict=True):
            axis.plot(value, place, marker, color=color, ms=6)
    axis.set_yticks(range(len(found)), list(found), fontsize=7)
    axis.invert_yaxis()
    axis.axvline(AIM_ITL, color="green", ls="--", lw=0.8)
    axis.axvline(REJECT_ITL, color="red", ls="--", lw=0.8)
    axis.set(xscale="log", xlabel="time between two tokens while it comes in, ms: p50 | p99 | max")
    _number(axis.xaxis)
    axis.grid(alpha=0.3, which="both", axis="x")


def _number(*axes: Any) -> None:
    """Whole numbers on logarithmic axes instead of powers of ten."""
    from matplotlib import ticker

    for axis in axes:
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 4)))
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(ticker.NullFormatter())


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the picture is written."""
    return draw_result(argv, __doc__, plot)


if __name__ == "__main__":
    sys.exit(main())
