#!/usr/bin/env python3
"""Many rows of x through packed weights: ours beside cuBLAS, and beside a decode step.

    scripts/bench_prefill_gemm.py --output docs/results/prefill_gemm.json

First every backend at 128 to 2,048 rows, weights rotated past L2. Then a prefill of 36 layers that
may take only so many multiprocessors: its time, and that of the decode steps (145 products of eight
rows) which run beside it on a second stream. A control row, cuBLAS 22016x2048 at 32 rows, says
whether two runs met the same card.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.jit.shipped import compile_all
from kernels.jit.timing import copies_for, graph_times
from kernels.linear.gemm_plan import limit_multiprocessors
from kernels.linear.many_rows import ManyRows
from kernels.linear.strip import StripWeights, padded_columns
from kernels.linear.strip_dense import StripCublas
from kernels.linear.strip_few import SHIPPED as FEW_ROW_KERNELS
from kernels.linear.strip_few import StripFew
from kernels.linear.strip_gemm import TILES as AMPERE
from kernels.linear.strip_gemm import GemmAmpere
from kernels.linear.strip_gemm_hopper import SM, GemmHopper
from kernels.linear.strip_gemm_hopper import TILES as HOPPER
from kernels.linear.weights import LinearFn
from kernels.spec.device import compute_capability, device_info
from kernels.spec.op import OpKey
from overlap import Overlap, run_beside
from results import make_record, make_row, percentile, write_record

CUDA = torch.device("cuda", 0)
SHAPES = ("22016x2048", "2048x11008", "37888x3584", "3584x18944", "5632x2048", "2560x2048")
ROWS = (128, 256, 512, 1024, 2048)
GROUP = 128
CONTROL = (22016, 2048, 32)
LAYER = ((2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008))
"""Fused qkv, o, fused gate and up, down of a 3B model."""
HEAD = (151936, 2048)
LAYERS, DECODE_ROWS, PREFILL_COPIES = 36, 8, 4
SHARES = (132, 124, 116, 100, 84)
CHUNKS = (128, 512, 2048)
TARGETS_US = {(22016, 2048, 128): 27.0, (22016, 2048, 256): 43.0, (22016, 2048, 512): 71.0}
"""The best other kernels on this card, another run (docs/benchmarks.md)."""


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--iterations", type=int, default=15, help="timed replays of a graph")
    parser.add_argument("--warmup", type=int, default=3, help="replays thrown away")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="NxK each")
    parser.add_argument("--chunks", type=int, nargs="*", default=CHUNKS, help="rows of the prefill")
    parser.add_argument("--shares", type=int, nargs="*", default=SHARES, help="multiprocessors")
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def random_strips(n: int, k: int, bits: int) -> StripWeights:
    """Random codes and scales, drawn where they will lie: what they are costs no time."""
    blocks = padded_columns(bits, k) // 64
    shape = (n // 16, blocks, 32, 4) if bits == 4 else (n // 16, blocks // 4, 3, 32, 4)
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=CUDA)
    scales = (torch.rand(n // 16, k // GROUP, 16, device=CUDA) * 0.01).half()
    return StripWeights(bits, GROUP, n, k, words, scales, None, None, None)


def contenders(bits: int, n: int, k: int) -> dict[str, Callable[[StripWeights], LinearFn]]:
    """Every backend of ours that does not refuse, by name."""
    key = OpKey("linear", "cuda", "float16", 128, n, k, bits, GROUP, sm=compute_capability(CUDA))
    found: dict[str, Callable[[StripWeights], LinearFn]] = {}
    for backend in (GemmAmpere(), GemmHopper(), StripCublas()):
        if backend.refuse(key) is None:
            found[backend.name] = lambda strips, backend=backend: backend.prepare_strips(  # type: ignore[misc]
                strips, torch.float16
            )
    return found


def compile_first(bits: Sequence[int]) -> None:
    """Side by side; one after another, at first use, they would take minutes."""
    sm = compute_capability(CUDA)
    tiles = (*AMPERE, *(HOPPER if sm == SM else ()))
    needed = [tile.variant(each, GROUP, offsets=False) for tile in tiles for each in bits]
    compile_all([(variant, sm) for variant in (*needed, *FEW_ROW_KERNELS)], workers=16)


def measure_shape(n: int, k: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All contenders at all rows, us."""
    dense = [torch.randn(n, k, device=CUDA).half() for _ in range(copies_for(2 * n * k))]
    inputs = {m: torch.randn(m, k, device=CUDA).half() for m in ROWS}
    rows = []
    for m, x in inputs.items():
        calls = [lambda w=w, x=x: torch.mm(x, w.T) for w in dense]  # type: ignore[misc]
        rows.append(timed(calls, {"n": n, "k": k, "m": m, "bits": 16, "backend": "cublas"}, args))
    del dense
    for bits in args.bits:
        strips = [random_strips(n, k, bits) for _ in range(copies_for(n * k * bits // 8))]
        for name, prepare in contenders(bits, n, k).items():
            layers = [prepare(each) for each in strips]
            for m, x in inputs.items():
                calls = [lambda f=f, x=x: f(x) for f in layers]  # type: ignore[misc]
                case = {"n": n, "k": k, "m": m, "bits": bits, "backend": name}
                rows.append(timed(calls, case | plan_of(layers[0], m), args))
    return rows


def plan_of(run: LinearFn, m: int) -> dict[str, Any]:
    """How the call is cut, where it is one of ours."""
    if not isinstance(run, ManyRows):
        return {}
    plan = run.plan_for(m)
    tile = f"{plan.tile.n}x{plan.tile.m}"
    return {"tile": tile, "whole": plan.whole, "splits": plan.splits, "units": plan.units}


def timed(
    calls: Sequence[Callable[[], object]], case: Mapping[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """One row, in us."""
    times = graph_times(calls, args.iterations, args.warmup)
    return make_row(case, "time", "us", [1000 * t for t in times], args.warmup)


def prefill_of(m: int, layers: Sequence[LinearFn]) -> Callable[[], None]:
    """36 layers; the packed weights of four of them in turn, which is past L2."""
    x = {k: torch.randn(m, k, device=CUDA).half() for _, k in LAYER}

    def run() -> None:
        for layer in range(LAYERS):
            for place, (_, k) in enumerate(LAYER):
                layers[layer % PREFILL_COPIES * len(LAYER) + place](x[k])

    return run


def decode_step() -> Callable[[], None]:
    """145 products of eight rows, every layer with weights of its own."""
    shapes = (*LAYER * LAYERS, HEAD)
    layers = [(StripFew(random_strips(n, k, 4)), k) for n, k in shapes]
    x = {k: torch.randn(DECODE_ROWS, k, device=CUDA).half() for _, k in shapes}

    def run() -> None:
        for layer, k in layers:
            layer(x[k])

    return run


def measure_overlap(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prefill and decode alone and together, by backend, chunk and share of the card."""
    if not args.chunks:
        return []
    whole = device_info(CUDA).multiprocessors
    decode = decode_step()
    rows: list[dict[str, Any]] = []
    for name, prepare in contenders(4, *LAYER[0]).items():
        if name == StripCublas.name:
            continue
        layers = [prepare(random_strips(n, k, 4)) for n, k in LAYER * PREFILL_COPIES]
        for m in args.chunks:
            for share in args.shares:
                if share > whole:
                    continue
                with limit_multiprocessors(share):
                    beside = run_beside(prefill_of(m, layers), decode)
                case = {"backend": name, "bits": 4, "m": m, "max_ctas": share}
                rows += overlap_rows(case, beside)
    return rows


def overlap_rows(case: Mapping[str, Any], found: Overlap) -> list[dict[str, Any]]:
    """Four quantities, ms."""
    values = {
        "prefill_alone": found.prefill_alone,
        "prefill_beside_decode": found.prefill_beside,
        "decode_step_alone": found.decode_alone,
        "decode_step_beside_prefill": found.decode_beside,
    }
    return [make_row(case, name, "ms", raw, 1) for name, raw in values.items()]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the result says, a line a shape, bits and number of rows, then a line a share."""
    lines = []
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for row in rows:
        case = row["case"]
        if row["metric"] == "time" and case["m"] in ROWS:
            bits = args_bits(case)
            for each in bits:
                key = (case["n"], case["k"], each, case["m"])
                times.setdefault(key, {})[case["backend"]] = row["median"]
    for (n, k, bits, m), found in sorted(times.items(), reverse=True):
        cells = "  ".join(f"{name.removeprefix('cuda.')} {us:.1f}" for name, us in found.items())
        target = TARGETS_US.get((n, k, m))
        lines.append(f"W{bits} {n}x{k} M={m}: {cells}" + (f"  (peers {target})" if target else ""))
    shares: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = {}
    for row in rows:
        case = row["case"]
        if "max_ctas" in case:
            place = (case["backend"], case["m"], case["max_ctas"])
            shares.setdefault(place, {})[row["metric"]] = row["median"], row["max"]
    for (name, m, share), found in shares.items():
        cells = "  ".join(f"{metric} {a:.2f} (max {b:.2f})" for metric, (a, b) in found.items())
        lines.append(f"{name} chunk {m}, {share} multiprocessors: {cells}")
    return "\n".join(lines)


def args_bits(case: Mapping[str, Any]) -> tuple[int, ...]:
    """A dense row stands beside the packed rows of either width."""
    return (4, 3) if case["bits"] == 16 else (case["bits"],)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = build_parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    compile_first(args.bits)
    for shape in args.shapes:
        n, k = map(int, shape.split("x"))
        rows += measure_shape(n, k, args)
        torch.cuda.empty_cache()
        print(f"{shape} done", file=sys.stderr, flush=True)
    n, k, m = CONTROL
    dense = [torch.randn(n, k, device=CUDA).half() for _ in range(4)]
    x = torch.randn(m, k, device=CUDA).half()
    calls = [lambda w=w: torch.mm(x, w.T) for w in dense]  # type: ignore[misc]
    rows.append(timed(calls, {"n": n, "k": k, "m": m, "bits": 16, "backend": "cublas"}, args))
    print(f"control: {percentile(rows[-1]['raw'], 0.5):.1f} us")
    rows += measure_overlap(args)
    switches = {
        name: str(value) for name, value in vars(args).items() if name not in ("note", "output")
    }
    write_record(make_record("prefill_gemm", switches, rows, args.note), args.output)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
