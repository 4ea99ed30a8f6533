#!/usr/bin/env python3
"""The seed's tiled prefill GEMM beside its old fallback, and beside what we run today.

    scripts/bench_sm86_tiled_prefill.py --iterations 20 \\
        --output docs/results/qwen_sm86_tiled_prefill.json

The seed's shapes, 30 rows, groups of 128, symmetric synthetic weights. In one run for each shape:
the tiled kernel as the seed describes it; the same with its tiles fetched by cp.async in 1, 2 and 3
stages; `forward_dequant_cublas`, the fallback it was compared with (the same layer unpacked in
torch and multiplied by cuBLAS, never dense cuBLAS alone); one dequantising kernel + cuBLAS; ours,
the backend that the tuned table gives; fp16 cuBLAS on dense weights. Then the W3 GEMV with
grid.y = batch against the W3 batch tile. The seed's figures (RTX 3050 Laptop) stand beside ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.jit.timing import copies_for, graph_times
from kernels.linear.cost import linear_bytes, linear_flops
from kernels.linear.cuda import Cuda
from kernels.linear.dequantise_cublas import DequantiseCublas
from kernels.linear.seed import SeedBatchTile, SeedGemv, SeedTiled
from kernels.linear.seed_fallback import SeedFallback
from kernels.linear.weights import LinearFn, linear_key
from kernels.pack.packed_linear import PackedLinear
from results import make_record, make_row, percentile, write_record

GROUP = 128
WARMUP = 3
TILED, FALLBACK, OURS = "seed_tiled", "forward_dequant_cublas", "ours"


@dataclass(frozen=True)
class Case:
    """One shape with the seed's own times of it, ms (RTX 3050 Laptop, article section 2.7)."""

    bits: int
    n: int
    k: int
    seed_tiled_ms: float
    seed_fallback_ms: float


CASES = (
    Case(4, 5632, 2048, 0.736, 2.109),
    Case(4, 2048, 5632, 0.834, 1.884),
    Case(4, 3584, 18944, 4.632, 10.365),
    Case(3, 37888, 3584, 6.081, 57.467),
    Case(3, 3584, 18944, 3.553, 27.400),
)
BATCH_SHAPE = (5632, 2048)
SEED_BATCH_MS = {2: (0.1306, 0.2716), 4: (0.2543, 0.5162), 8: (0.5099, 0.9583)}
"""Rows -> (grid.y = batch, batch tile) of the seed, article section 3.2."""
Prepare = Callable[[PackedLinear], LinearFn]


def build_parser() -> argparse.ArgumentParser:
    """The seed's two flags, and what makes a run short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--rows", type=int, default=30, help="rows of x: the seed's M")
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def random_layer(bits: int, n: int, k: int, seed: int) -> PackedLinear:
    """Random bytes are random codes; fresh for every copy."""
    draw = torch.Generator(device="cuda").manual_seed(seed)
    size = (n, k * bits // 8)
    codes = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda", generator=draw)
    scales = torch.rand((n, k // GROUP), device="cuda", generator=draw) * 0.02 + 0.005
    return PackedLinear(bits, GROUP, k, codes, scales.half())


def prompt_ways() -> dict[str, Prepare]:
    """Name in the result -> how to prepare a layer."""
    half = torch.float16
    ways: dict[str, Prepare] = {
        TILED: lambda layer: SeedTiled().prepare(layer, half),
        FALLBACK: lambda layer: SeedFallback(layer).forward_dequant_cublas,
        "dequantise_kernel_cublas": lambda layer: DequantiseCublas().prepare(layer, half),
        OURS: lambda layer: Cuda().prepare(layer, half),
        "cublas_fp16": _dense,
    }
    for stages in (1, 2, 3):
        ways[f"seed_tiled_cp_async_{stages}"] = lambda layer, stages=stages: SeedTiled(
            stages
        ).prepare(layer, half)
    return ways


def _dense(layer: PackedLinear) -> LinearFn:
    weight = SeedFallback(layer).dequantize().T
    return lambda x: torch.mm(x, weight)


def batch_ways() -> dict[str, Prepare]:
    """W3 for few rows: the seed's choice and its experiment."""
    return {
        "grid_y_batch": lambda layer: SeedGemv().prepare(layer, torch.float16),
        "batch_tile": lambda layer: SeedBatchTile(3).prepare(layer, torch.float16),
    }


def measure(
    bits: int, n: int, k: int, rows: int, ways: Mapping[str, Prepare], iterations: int
) -> dict[str, list[float]]:
    """Milliseconds of each way. Raises ValueError where one does not agree with the fallback."""
    copies = [random_layer(bits, n, k, seed) for seed in range(copies_for(n * k * bits // 8))]
    x = torch.randn(rows, k, device="cuda", dtype=torch.float16)
    wanted = SeedFallback(copies[0]).forward_dequant_cublas(x).float()
    found = {}
    for name, prepare in ways.items():
        runs = [prepare(layer) for layer in copies[: None if "cublas" not in name else 8]]
        worst = float((runs[0](x).float() - wanted).abs().max() / wanted.abs().max())
        if not worst < 5e-3:
            raise ValueError(f"{name} is off by {worst:.1e} at {n}x{k}")
        calls = [lambda run=run: run(x) for run in runs]
        found[name] = graph_times(calls, iterations, WARMUP)
        del runs, calls
        torch.cuda.empty_cache()
    return found


def rows_of(
    times: Mapping[str, list[float]], case: Mapping[str, Any], pairs: Mapping[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    """A row of times a way, and a row for each ratio (slower, faster) taken run by run."""
    rows = [
        make_row({**case, "way": name}, "time", "ms", raw, WARMUP) for name, raw in times.items()
    ]
    for name, (over, under) in pairs.items():
        raw = [a / b for a, b in zip(times[over], times[under], strict=True)]
        rows.append(make_row({**case, "way": name}, "speedup", "x", raw, WARMUP))
    return rows


def prompt_rows(case: Case, rows: int, iterations: int) -> list[dict[str, Any]]:
    """One of the seed's shapes."""
    times = measure(case.bits, case.n, case.k, rows, prompt_ways(), iterations)
    layer = random_layer(case.bits, case.n, case.k, 0)
    key = linear_key(layer, torch.float16, layer.qweight.device, exact=False)
    ours = next(c.backend for _, c in Cuda().choices(key) if c.first <= rows <= c.last)
    key = replace(key, m=rows)
    shape = {
        "bits": case.bits,
        "shape": f"{rows}x{case.n}x{case.k}",
        "group": GROUP,
        "bytes": linear_bytes(key),
        "flops": linear_flops(key),
        "ours": ours,
        "seed_tiled_ms": case.seed_tiled_ms,
        "seed_fallback_ms": case.seed_fallback_ms,
        "seed_speedup": round(case.seed_fallback_ms / case.seed_tiled_ms, 2),
    }
    show(shape, times)
    pairs = {
        "tiled over fallback": (FALLBACK, TILED),
        "ours over fallback": (FALLBACK, OURS),
        "ours over tiled": (TILED, OURS),
    }
    return rows_of(times, shape, pairs)


def batch_rows(iterations: int) -> list[dict[str, Any]]:
    """W3 at 2, 4 and 8 rows; the seed's ratio is grid.y's time over the batch tile's."""
    rows = []
    n, k = BATCH_SHAPE
    for batch, (grid_y, tile) in SEED_BATCH_MS.items():
        times = measure(3, n, k, batch, batch_ways(), iterations)
        shape = {
            "bits": 3,
            "shape": f"{batch}x{n}x{k}",
            "group": GROUP,
            "seed_grid_y_ms": grid_y,
            "seed_batch_tile_ms": tile,
            "seed_speedup": round(grid_y / tile, 2),
        }
        show(shape, times)
        pairs = {"batch tile over grid.y": ("grid_y_batch", "batch_tile")}
        rows += rows_of(times, shape, pairs)
    return rows


def show(shape: Mapping[str, Any], times: Mapping[str, list[float]]) -> None:
    """One line a shape."""
    medians = ", ".join(f"{name} {percentile(raw, 0.5):.4f}" for name, raw in times.items())
    print(f"W{shape['bits']} {shape['shape']} (ms): {medians}", flush=True)


def main() -> int:
    """Returns the exit code: 2 without a GPU."""
    args = build_parser().parse_args()
    if not torch.cuda.is_available():
        print("this bench needs a CUDA device; torch finds none", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows += prompt_rows(case, args.rows, args.iterations)
    rows += batch_rows(args.iterations)
    switches = {"iterations": args.iterations, "rows": args.rows, "warmup": WARMUP, "group": GROUP}
    record = make_record("qwen_sm86_tiled_prefill", switches, rows, args.note)
    write_record(record, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
