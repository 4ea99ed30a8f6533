#!/usr/bin/env python3
"""Draw results of bench_quality.py on one source: bits a weight against KL, a mark a method.

    scripts/plot_quality.py docs/results/quality*.json --output docs/results/quality.png

Needs matplotlib (extra `bench`). Measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OTHER = "other run"


def points(record: Mapping[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """Method -> (bits a weight, KL, case) in rising order of bits."""
    bits = {
        row["case"]["case"]: row["median"]
        for row in record["rows"]
        if row["metric"] == "bits_per_weight"
    }
    found: dict[str, list[tuple[float, float, str]]] = {}
    for row in record["rows"]:
        if row["metric"] == "kl":
            case = row["case"]
            found.setdefault(case["method"], []).append(
                (bits[case["case"]], row["median"], case["case"])
            )
    return {method: sorted(values) for method, values in found.items()}


def plot(records: Sequence[Mapping[str, Any]], path: Path, without: Sequence[str] = ()) -> None:
    """Write the picture; the format is that of the file's name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.5, 5), constrained_layout=True)
    together: dict[str, set[tuple[float, float, str]]] = {}
    for record in records:
        for method, found in points(record).items():
            if method not in without:
                together.setdefault(method, set()).update(found)
    for method, values in sorted((method, sorted(found)) for method, found in together.items()):
        style = "x" if OTHER in method else "o"
        axis.plot([b for b, _, _ in values], [k for _, k, _ in values], style, label=method)
        for bits, kl, case in values if style == "o" else ():
            axis.annotate(case, (bits, kl), textcoords="offset points", xytext=(5, 3), fontsize=7)
    axis.set_yscale("log")
    axis.set_xlabel("bits a weight in the layers, scales and offsets included")
    axis.set_ylabel("KL to the source, nats")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    axis.set_title(records[0]["switches"].get("model", ""))
    figure.savefig(path, dpi=120)


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
