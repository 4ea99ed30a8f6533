#!/usr/bin/env python3
"""Paged decode attention against the card's read bandwidth: fp16 and INT8 KV, beside torch's SDPA.

    scripts/bench_attention.py --output docs/results/attention.json --plot attention.png

Every time is of launches captured in one CUDA graph, the combine of splits included; the graphs of
a case take turns. Caches are rotated so that what a launch reads is not left in L2 from the one
before. `decode_heads` is what a replayed decode step runs: rotation and the write of the new token
included, the cache asked for before the launch ahead ends. `paged_decode` is attention alone. The
twin is torch's scaled_dot_product_attention over contiguous keys and values of the same sizes: it
gathers nothing, so it is the kindest comparison. `read_ceiling` is what a plain kernel reads of
2 GiB in this run.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.attention.cuda import SHIPPED as PAGED
from kernels.attention.cuda import CudaAttention, DecodeTensors, static_plan_cuda
from kernels.attention.decode_heads import SHIPPED as FUSED
from kernels.attention.decode_heads import DecodeHeads
from kernels.jit.kernel import CudaSource
from kernels.jit.shipped import compile_all
from kernels.pack.int8_kv import Int8KV
from kernels.spec.device import compute_capability
from results import make_record, make_row, percentile, write_record

HEAD_DIM, BLOCK_TOKENS = 128, 16
ROTATED_BYTES = 256 << 20
"""What the launches of one graph read between two looks at the same cache; L2 holds 60 MiB."""
GRAPH_SECONDS = 400e-6
CEILING_BYTES = 2 << 30
WARMUP = 2
READER = """\
extern "C" __global__ void read_all(const uint4* from, int* sink, int kibi_vectors) {
    size_t count = size_t(kibi_vectors) << 10, stride = size_t(gridDim.x) * blockDim.x * 8;
    uint4 mixed = {0, 0, 0, 0};
    for (size_t i = size_t(blockIdx.x) * blockDim.x * 8 + threadIdx.x; i < count; i += stride) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            uint4 v = __ldg(from + i + k * blockDim.x);
            mixed.x ^= v.x, mixed.y ^= v.y, mixed.z ^= v.z, mixed.w ^= v.w;
        }
    }
    if ((mixed.x ^ mixed.y ^ mixed.z ^ mixed.w) == 0x12345678) *sink = 1;
}
"""


@dataclass(frozen=True)
class Cell:
    """One measured case. kv: "fp16" or "int8"."""

    heads: int
    kv_heads: int
    batch: int
    context: int
    kv: str

    @property
    def n_blocks(self) -> int:
        return self.batch * -(-self.context // BLOCK_TOKENS)

    @property
    def kv_bytes(self) -> int:
        """What must be read: keys, values and scales of every cached token."""
        per_head = 2 * HEAD_DIM if self.kv == "fp16" else HEAD_DIM + 2
        return self.batch * self.context * 2 * self.kv_heads * per_head

    @property
    def sets(self) -> int:
        """Caches to rotate."""
        return max(1, min(512, math.ceil(ROTATED_BYTES / self.kv_bytes)))


Launch = Callable[[int], None]


def captured(launch: Launch, sets: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of launch(i), i cycling over the sets, and how many they are."""
    for i in range(min(sets, 3)):
        launch(i)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch(0)
    end.record()
    end.synchronize()
    count = max(sets, math.ceil(GRAPH_SECONDS / max(start.elapsed_time(end) / 1e3, 2e-6)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launch(i % sets)
    return graph, count


def timed(launches: Sequence[Launch], sets: int, repeats: int) -> list[list[float]]:
    """Microseconds of one launch, by contender; one value a graph replay."""
    graphs = [captured(launch, sets) for launch in launches]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: list[list[float]] = [[] for _ in graphs]
    for _ in range(repeats + WARMUP):
        for values, (graph, count) in zip(found, graphs, strict=True):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            values.append(start.elapsed_time(end) * 1e3 / count)
    return [values[WARMUP:] for values in found]


def read_ceiling(repeats: int) -> list[float]:
    """Bytes per microsecond of reading CEILING_BYTES once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "read_all.cu"
        path.write_text(READER, encoding="utf-8")
        kernel = CudaSource(str(path)).kernel("read_all")
        data = torch.randint(0, 255, (CEILING_BYTES,), dtype=torch.uint8, device="cuda")
        sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        grid = (torch.cuda.get_device_properties(0).multi_processor_count * 8, 1, 1)
        vectors = CEILING_BYTES // 16 >> 10
        kernel.load()
        read = [lambda _: kernel.launch(grid, (256, 1, 1), data, sink, vectors)]
        times = timed(read, 1, repeats)[0]
    return [CEILING_BYTES / time for time in times]


def random_cache(cell: Cell, blocks: int) -> torch.Tensor | Int8KV:
    """Random keys and values: zeros would flatter the card."""
    shape = (blocks, BLOCK_TOKENS, 2, cell.kv_heads, HEAD_DIM)
    if cell.kv == "fp16":
        return torch.empty(shape, dtype=torch.float16, device="cuda").normal_()
    codes = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
    scales = torch.rand(blocks, BLOCK_TOKENS, cell.kv_heads, 2, device="cuda").half() * 0.02
    return Int8KV(codes, scales)


def contenders(cell: Cell) -> dict[str, Launch]:
    """By name. As in a model, one table and length serve many caches, each read once. The newest
    token, which decode_heads writes, is the same one each time.
    """
    caches = [random_cache(cell, cell.n_blocks) for _ in range(cell.sets)]
    table = torch.randperm(cell.n_blocks, device="cuda").int().view(cell.batch, -1)
    lengths = torch.full((cell.batch,), cell.context, dtype=torch.int32, device="cuda")
    plan = static_plan_cuda(table, lengths, cell.context, BLOCK_TOKENS)
    cos, sin = torch.randn(2, cell.batch, 1, HEAD_DIM, device="cuda")
    fused = DecodeHeads(cos, sin, plan, cell.heads, cell.kv_heads, HEAD_DIM**-0.5)
    rows = cell.heads + 2 * cell.kv_heads
    heads = torch.randn(cell.batch, rows, HEAD_DIM, device="cuda").half()
    attend, step = CudaAttention(), DecodeTensors(table, lengths, None, cell.context)
    q = torch.randn(cell.batch, cell.heads, HEAD_DIM, device="cuda").half() / HEAD_DIM**0.5
    out = torch.empty(cell.batch, cell.heads * HEAD_DIM, dtype=q.dtype, device="cuda")
    found: dict[str, Launch] = {
        "decode_heads": lambda i: void(fused(heads, caches[i], None)),
        "paged_decode": lambda i: attend.decode(q, caches[i], step, out, BLOCK_TOKENS, None),
    }
    return found | ({"torch_sdpa": torch_twin(cell)} if cell.kv == "fp16" else {})


def void(_: object) -> None:
    """For calls whose result nobody reads."""


def torch_twin(cell: Cell) -> Launch:
    """torch's SDPA, contiguous keys and values."""
    shape = (cell.sets, 2, cell.batch, cell.kv_heads, cell.context, HEAD_DIM)
    kv = torch.empty(shape, dtype=torch.float16, device="cuda").normal_()
    q = torch.randn(cell.batch, cell.heads, 1, HEAD_DIM, device="cuda").half()
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda i: void(attend(q, kv[i, 0], kv[i, 1], scale=HEAD_DIM**-0.5, enable_gqa=True))


def measure(cells: Sequence[Cell], repeats: int) -> list[dict[str, Any]]:
    """Rows of the record, and a line a cell on the way."""
    needed = [each for each in (*PAGED, *FUSED) if each.defines["HEAD_DIM"] == HEAD_DIM]
    compile_all(
        [(each, compute_capability(torch.device("cuda", 0))) for each in needed], workers=12
    )
    ceiling = read_ceiling(repeats)
    rows = [make_row({"bytes": CEILING_BYTES}, "read_ceiling", "bytes/us", ceiling, WARMUP)]
    best = percentile(ceiling, 0.5)
    print(f"read ceiling {best / 1e6:.2f} TB/s")
    fp16: dict[tuple[int, ...], dict[str, float]] = {}
    for cell in cells:
        launches = contenders(cell)
        times = dict(zip(launches, timed([*launches.values()], cell.sets, repeats), strict=True))
        place = (cell.heads, cell.kv_heads, cell.batch, cell.context)
        medians = {way: percentile(values, 0.5) for way, values in times.items()}
        line = f"{cell.heads}/{cell.kv_heads} b{cell.batch:<3} ctx {cell.context:<6} {cell.kv}"
        for way, values in times.items():
            case = asdict(cell) | {"kv_bytes": cell.kv_bytes, "way": way}
            rates = [cell.kv_bytes / value for value in values]
            rows.append(make_row(case, "time", "us", values, WARMUP))
            rows.append(make_row(case, "read", "TB/s", [rate / 1e6 for rate in rates], WARMUP))
            rows.append(make_row(case, "of_ceiling", "", [rate / best for rate in rates], WARMUP))
            rate = cell.kv_bytes / medians[way]
            line += f"  {way} {medians[way]:.2f} us {rate / 1e6:.2f} TB/s {rate / best:.0%}"
            if way in fp16.get(place, {}):
                line += f" {medians[way] / fp16[place][way]:.3f}x of fp16"
        if cell.kv == "fp16":
            fp16[place] = medians
        print(line, flush=True)
        del launches
        torch.cuda.empty_cache()
    return rows


def plot(record: dict[str, Any], path: Path) -> None:
    """Bandwidth over cached tokens, one panel a head layout. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    read_rows = [row for row in record["rows"] if row["metric"] == "read"]
    ceiling = next(row["median"] for row in record["rows"] if row["metric"] == "read_ceiling")
    layouts = sorted({(row["case"]["heads"], row["case"]["kv_heads"]) for row in read_rows})
    figure, axes = pyplot.subplots(
        1, len(layouts), figsize=(6 * len(layouts), 4), constrained_layout=True, squeeze=False
    )
    for axis, layout in zip(axes[0], layouts, strict=True):
        for index, (way, kv) in enumerate(
            (("decode_heads", "fp16"), ("decode_heads", "int8"), ("torch_sdpa", "fp16"))
        ):
            found = [
                (row["case"]["batch"] * row["case"]["context"], row["median"])
                for row in read_rows
                if (row["case"]["heads"], row["case"]["kv_heads"]) == layout
                and (row["case"]["way"], row["case"]["kv"]) == (way, kv)
            ]
            axis.plot(
                *zip(*sorted(found), strict=True), "o", color=f"C{index}", label=f"{way} {kv}"
            )
        axis.axhline(ceiling / 1e6, color="grey", linestyle="--", label="read ceiling")
        axis.set(xscale="log", xlabel="cached tokens", ylabel="TB/s", ylim=(0, None))
        axis.set_title("{} query heads, {} KV heads of 128".format(*layout))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", default=["16/2", "28/4"], help="query/KV heads")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    layouts = [tuple(map(int, text.split("/"))) for text in args.heads]
    cells = [
        Cell(heads, kv_heads, batch, context, kv)
        for heads, kv_heads in layouts
        for batch in args.batches
        for context in args.contexts
        for kv in ("fp16", "int8")
    ]
    rows = measure(cells, args.repeats)
    switches = {name: value for name, value in vars(args).items() if name not in ("output", "plot")}
    record = make_record("attention", switches, rows)
    write_record(record, args.output)
    if args.plot is not None:
        plot(record, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
