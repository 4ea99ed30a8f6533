#!/usr/bin/env python3
"""Linear layers of 3 and 4 bits for 1 to 2,048 rows, beside their baselines, in one run on a GPU.

    scripts/bench_linear.py --output docs/results/linear.json

Weights rotate among copies that are together more than twice the L2, launches are captured in a
CUDA graph of 400 us or more, replays are timed by events; a value is a launch's share of one
replay. Slow calls are launched less often: what L2 could save them is little. Both ceilings,
reading and multiplying, are measured in the same run, and so is a control row (cuBLAS at
22016 x 2048, 32 rows) at both ends of it. scripts/plot_linear.py draws the file.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.jit.kernel import CudaSource
from kernels.pack.dequantise import dequantise
from linear_contenders import (
    CONTENDERS,
    CUDA,
    GROUP,
    Call,
    Contender,
    missing_contenders,
    random_layers,
)
from results import make_record, make_row, write_record

SHAPES = (
    "2048x2048 2560x2048 5632x2048 22016x2048 151936x2048 2048x5632 2048x11008 "
    "3584x3584 4608x3584 18944x3584 37888x3584 3584x18944"
).split()
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CONTROL = (22016, 2048, 32)
LEAST_GRAPH_US = 400.0
MOST_GRAPH_US = 4000.0
"""Where all copies once would take longer, some of them do."""
MOST_CASE_US = 60_000.0
"""Where that many replays would take longer, there are fewer, LEAST_REPLAYS at least."""
LEAST_REPLAYS = 3
WARMUP = 3
FAILED = "failed:"
READ_BYTES = 1 << 32
READ_SOURCE = CudaSource(str(Path(__file__).with_name("read_bandwidth.cu")))


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--bits", nargs="+", type=int, choices=(3, 4), default=[4, 3])
    parser.add_argument("--contenders", nargs="+", default=[each.name for each in CONTENDERS])
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=math.inf,
        help="cases that would begin later are left out",
    )
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def time_calls(calls: Sequence[Call], x: torch.Tensor, replays: int) -> list[float]:
    """Microseconds of one call, one value a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # a call may behave otherwise the first time
            call(x)
        start.record()
        calls[0](x)
        end.record()
        stream.synchronize()
        once = max(start.elapsed_time(end) * 1e3, 2.0)
        launches = launches_of(once, len(calls))
        graph = _capture(calls, x, launches, stream)
        took = _replay(graph, start, end, stream)
        if took < LEAST_GRAPH_US:
            # An eager launch is slower than one in a graph; the first replay says by how much.
            launches = launches_of(took / launches / 1.2, len(calls))
            graph = _capture(calls, x, launches, stream)
        for _ in range(WARMUP):
            took = _replay(graph, start, end, stream)
        replays = min(replays, max(LEAST_REPLAYS, int(MOST_CASE_US / took)))
        return [_replay(graph, start, end, stream) / launches for _ in range(replays)]


def launches_of(once: float, copies: int) -> int:
    """How many in a graph: every copy equally often, or fewer than all. once: us of one."""
    if once * copies > MOST_GRAPH_US:
        return max(1, int(MOST_GRAPH_US / once))
    return copies * math.ceil(LEAST_GRAPH_US / (once * copies))


def _capture(
    calls: Sequence[Call], x: torch.Tensor, launches: int, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            calls[i % len(calls)](x)
    return graph


def _replay(
    graph: torch.cuda.CUDAGraph,
    start: torch.cuda.Event,
    end: torch.cuda.Event,
    stream: torch.cuda.Stream,
) -> float:
    start.record()
    graph.replay()
    end.record()
    stream.synchronize()
    return start.elapsed_time(end) * 1e3


def ceilings(replays: int) -> dict[str, list[float]]:
    """Bytes per second that a kernel can read, and fp16 operations per second of cuBLAS."""
    room = torch.empty(READ_BYTES, dtype=torch.uint8, device=CUDA).random_()
    out = torch.zeros(1, dtype=torch.int32, device=CUDA)
    kernel = READ_SOURCE.kernel("read_all")
    blocks = torch.cuda.get_device_properties(CUDA).multi_processor_count * 4

    def read(_: torch.Tensor) -> torch.Tensor:
        kernel.launch((blocks, 1, 1), (512, 1, 1), room, READ_BYTES // 16, out)
        return out

    x, w = (torch.randn(8192, 8192, device=CUDA).half() for _ in range(2))
    reading = [READ_BYTES / (us * 1e-6) for us in time_calls([read], x, replays)]
    product = time_calls([lambda x: torch.mm(x, w)], x, replays)
    return {"read": reading, "multiply": [2 * 8192**3 / (us * 1e-6) for us in product]}


def copies_of(n: int, k: int, bits: int) -> int:
    """So many that they are more than twice the L2 together."""
    l2 = torch.cuda.get_device_properties(CUDA).L2_cache_size
    return max(2, math.ceil(2.2 * l2 / (n * k * bits / 8)))


def cases(
    args: argparse.Namespace, wanted: Sequence[Contender]
) -> Iterator[tuple[Contender, int, int, int]]:
    """(contender, bits of the module, n, k); dense weights once a shape, as bits 16."""
    for shape in args.shapes:
        n, k = map(int, shape.split("x"))
        for each in wanted:
            for bits in each.bits if each.bits == (16,) else args.bits:
                if bits in each.bits:
                    yield each, bits, n, k


def measure(
    args: argparse.Namespace, peak: dict[str, float], left_out: list[str]
) -> list[dict[str, Any]]:
    """All rows of the table, the control row first and last. left_out: cases there was no time for
    are added.
    """
    deadline = time.monotonic() + args.most_seconds
    wanted = [each for each in CONTENDERS if each.name in args.contenders]
    dense = next(each for each in CONTENDERS if each.bits == (16,))
    n, k, m = CONTROL
    rows = measure_case(dense, 16, n, k, [m], args.replays, peak, role="control, first")
    for each, bits, n, k in cases(args, wanted):
        if time.monotonic() > deadline:
            left_out.append(f"left out for want of time: {each.name}, {bits} bits, {n} x {k}")
            continue
        try:
            rows += measure_case(each, bits, n, k, args.rows, args.replays, peak)
        except (RuntimeError, ValueError) as error:
            left_out.append(f"{FAILED} {each.name}, {bits} bits, {n} x {k}: {error}")
        torch.cuda.empty_cache()
    n, k, m = CONTROL
    return rows + measure_case(dense, 16, n, k, [m], args.replays, peak, role="control, last")


def measure_case(
    each: Contender,
    bits: int,
    n: int,
    k: int,
    rows: Sequence[int],
    replays: int,
    peak: dict[str, float],
    role: str = "",
) -> list[dict[str, Any]]:
    """One contender on one shape, checked and timed for every number of rows."""
    layers = random_layers(n, k, 4 if bits == 16 else bits, copies_of(n, k, bits), seed=n + k)
    found, calls, made_for = [], [], -1
    for m in (m for m in rows if m >= each.least_rows):
        # What a contender prepares may depend on the number of rows; most of them do not.
        if made_for < 0 or each.name == "seed":
            calls, made_for = each.make(layers, m), m
        x = torch.randn(m, k, device=CUDA).to(each.dtype)
        error = relative_error(calls[0](x), x, layers[0])
        if not error < each.tolerance:
            raise ValueError(f"relative error {error:.1e} with {m} rows")
        moved = n * k * bits / 8 + 2 * m * (n + k) + (0 if bits == 16 else 2 * n * k / GROUP)
        floor = max(moved / peak["read"], 2 * m * n * k / peak["multiply"]) * 1e6
        raw = time_calls(calls, x, replays)
        case = {"contender": each.name, "bits": bits, "n": n, "k": k, "m": m, "role": role}
        case |= {"copies": len(layers), "bytes": int(moved), "flops": 2 * m * n * k}
        row = make_row(case, "time of a call", "us", raw, WARMUP)
        row["case"] |= {"floor_us": round(floor, 3), "relative_error": float(f"{error:.2e}")}
        row["case"]["of_roofline"] = round(floor / row["median"], 3)
        say(f"{each.name:28} w{bits:<2} {n:>6} x {k:<6} M={m:<3} {row['median']:9.2f} us", floor)
        found.append(row)
    return found


def relative_error(y: torch.Tensor, x: torch.Tensor, layer: Any) -> float:
    """Frobenius, against fp32, a slice of out-features at most."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = min(layer.out_features, 4096)
    part = type(layer)(layer.bits, layer.group, layer.in_features, layer.qweight[:rows],
                       layer.scales[:rows])  # fmt: skip
    want = x.float() @ dequantise(part).T
    return float((y[:, :rows].float() - want).norm() / want.norm())


def say(line: str, floor: float) -> None:
    """Progress for whoever watches."""
    print(f"{line}  (floor {floor:.2f})", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every case was right; the file is written in any case."""
    args = build_parser().parse_args(argv)
    found = ceilings(args.replays)
    peak = {name: sorted(values)[len(values) // 2] for name, values in found.items()}
    rows = [
        make_row({"ceiling": "read", "bytes": READ_BYTES}, "rate", "B/s", found["read"], WARMUP),
        make_row({"ceiling": "multiply"}, "rate", "FLOP/s", found["multiply"], WARMUP),
    ]
    left_out: list[str] = []
    rows += measure(args, peak, left_out)
    switches = {k: v for k, v in vars(args).items() if k not in ("output", "note")}
    switches["group"] = GROUP
    if math.isinf(args.most_seconds):
        del switches["most_seconds"]  # JSON knows no infinity
    notes = [*missing_contenders(), *args.note, *left_out]
    write_record(make_record("linear layers", switches, rows, notes), args.output)
    failed = [note for note in left_out if note.startswith(FAILED)]
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
