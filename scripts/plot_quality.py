#!/usr/bin/env python3
"""Draw results of bench_quality.py: bits a weight against KL and perplexity, a mark a method.

    scripts/plot_quality.py docs/results/quality*.json --output docs/results/quality.png

A row of pictures for each model that the results name, with .gguf or without. Needs
matplotlib (extra `bench`). Measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

OTHER = "other run"
AXES = (("kl", "KL to the source, nats"), ("perplexity", "perplexity"))
Point = tuple[float, float, str]


def points(record: Mapping[str, Any], metric: str = "kl") -> dict[str, list[Point]]:
    """Method -> (bits a weight, value, case) in rising order of bits."""
    bits = {
        row["case"]["case"]: row["median"]
        for row in record["rows"]
        if row["metric"] == "bits_per_weight"
    }
    found: dict[str, list[Point]] = {}
    for row in record["rows"]:
        if row["metric"] == metric:
            case = row["case"]
            found.setdefault(case["method"], []).append(
                (bits[case["case"]], row["median"], case["case"])
            )
    return {method: sorted(values) for method, values in found.items()}


def joined(
    records: Iterable[Mapping[str, Any]], metric: str, without: Sequence[str]
) -> dict[str, list[Point]]:
    """The same of several records, by method in order of names; a case of two records comes once
    where both found the same."""
    together: dict[str, set[Point]] = {}
    for record in records:
        for method, found in points(record, metric).items():
            if method not in without:
                together.setdefault(method, set()).update(found)
    return {method: sorted(together[method]) for method in sorted(together)}


def plot(records: Sequence[Mapping[str, Any]], path: Path, without: Sequence[str] = ()) -> None:
    """Write the picture; the format is that of the file's name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        model = record["switches"].get("model", "").removesuffix(".gguf")
        by_model.setdefault(model, []).append(record)
    methods = sorted({row["case"]["method"] for record in records for row in record["rows"]})
    colours = {method: f"C{number}" for number, method in enumerate(methods)}
    size = (7.5 * len(AXES), 5 * len(by_model))
    figure, grid = pyplot.subplots(
        len(by_model), len(AXES), figsize=size, constrained_layout=True, squeeze=False
    )
    for axes, (model, some) in zip(grid, by_model.items(), strict=True):
        for axis, (metric, label) in zip(axes, AXES, strict=True):
            _draw(axis, joined(some, metric, without), colours)
            axis.set_ylabel(label)
            axis.set_title(model)
    figure.savefig(path, dpi=120)


def _draw(axis: Any, found: Mapping[str, Sequence[Point]], colours: Mapping[str, str]) -> None:
    for method, values in found.items():
        style = "x" if OTHER in method else "o"
        axis.plot(
            [b for b, _, _ in values],
            [v for _, v, _ in values],
            style,
            color=colours[method],
            label=method,
        )
        for bits, value, case in values if style == "o" else ():
            text = case.removesuffix(f":{method}")
            axis.annotate(
                text, (bits, value), textcoords="offset points", xytext=(5, 3), fontsize=7
            )
    axis.set_yscale("log")
    for every in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        every("{x:g}")
    axis.tick_params(axis="y", which="minor", labelsize=7)
    axis.set_xlabel("bits a weight in the layers, scales and offsets included")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)


def main(arguments: list[str] | None = None) -> int:
    """Draw one picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--without", action="append", default=[], help="a method to leave out")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    records = [json.loads(path.read_text(encoding="utf-8")) for path in options.records]
    plot(records, options.output, options.without)
    return 0


if __name__ == "__main__":
    sys.exit(main())
