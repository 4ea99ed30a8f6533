#!/usr/bin/env python3
"""Every CUDA backend of the linears at every number of rows: the evidence behind kernels/tuned.

    scripts/bench_tuned_linear.py --output docs/results/tuned_linear.json

The shapes are the fused linears of Qwen2.5 3B and 7B, groups of 128. Prints which backend wins from
which number of rows on, with and without those that need Hopper's own instructions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from kernels.linear.cuda import BACKENDS
from kernels.linear.tune import ITERATIONS, WARMUP, Shape, ShapeTimer, table_rows, time_shape
from kernels.spec.device import compute_capability
from results import make_record, make_row, write_record

SIZES = (
    (2560, 2048),
    (2048, 2048),
    (22016, 2048),
    (2048, 11008),
    (4608, 3584),
    (37888, 3584),
    (3584, 18944),
)
HOPPER_ONLY = ("cuda.gemm_hopper", "cuda.strip_order", "cuda.strip_stream")


def main() -> int:
    """Returns the exit code: 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--group", type=int, default=128)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this bench needs a CUDA device; torch finds none", file=sys.stderr)
        return 2
    sm = compute_capability(torch.device("cuda"))
    rows: list[dict[str, Any]] = []
    for n, k in SIZES:
        for bits in (4, 3):
            rows += measure(Shape(n, k, bits, args.group), sm)
            torch.cuda.empty_cache()
    switches = {"group": args.group, "replays": ITERATIONS}
    write_record(make_record("tuned_linear", switches, rows), args.output)
    return 0


def measure(shape: Shape, sm: int) -> list[dict[str, Any]]:
    """Medians of every backend, and a line for each table."""
    times = time_shape(shape, ShapeTimer(shape), BACKENDS, sm)
    portable = {
        m: {name: ms for name, ms in found.items() if name not in HOPPER_ONLY}
        for m, found in times.items()
    }
    for title, each in ((f"sm_{sm}", times), ("portable", portable)):
        spans = [f"{row.m[0]}-{row.m[1]} {row.backend}" for row in table_rows(shape, each)]
        print(f"{shape} {title}: {', '.join(spans)}", flush=True)
    return [
        make_row(
            {"n": shape.n, "k": shape.k, "bits": shape.bits, "rows": m, "backend": name},
            "median time",
            "us",
            [ms * 1e3],
            WARMUP,
        )
        for m, found in times.items()
        for name, ms in found.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
