"""The smallest call of every kernel, for tools that watch each access, as compute-sanitizer does.

    compute-sanitizer --tool memcheck --kernel-name-exclude kernel_substring=at6native \\
        python -m tests.kernels_gpu.small_set

Each case is checked against its reference here too. Prints what ran; 1 if anything is wrong or was
left out. test_small_set.py runs the same cases and holds that no kernel's source is missing.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from engine_actor.quant.grid import Grid
from kernels.attention.op import ATTENTION
from kernels.linear import strip_gemm, strip_gemm_hopper
from kernels.linear.cuda import BACKENDS
from kernels.linear.many_rows import ManyRows
from kernels.linear.op import LINEAR
from kernels.linear.reference import linear_reference
from kernels.linear.strip import to_strips
from kernels.linear.strip_few import StripFew
from kernels.linear.strip_order import Ordered
from kernels.linear.strip_stream import SM, StreamTile
from kernels.linear.weights import moved
from kernels.spec.device import compute_capability
from tests.kernels_cpu.layers import random_layer
from tests.kernels_gpu import (
    gemm_cases,
    strips,
    test_attention_cuda,
    test_carried_norm,
    test_decode_heads,
    test_host_copy,
    test_kv_cuda,
    test_linear_seed,
    test_round_columns,
    test_rows_cuda,
    test_sampling_cuda,
    test_stage_cuda,
    test_static_prompts,
)
from tests.kernels_gpu.paged import ragged


def near(y: torch.Tensor, want: torch.Tensor) -> None:
    """NaN is near nothing."""
    error = float((y.float() - want).abs().max() / want.abs().max())
    assert error < LINEAR.allowed("float16"), f"{error:.1e}"


def few_rows(name: str, rows: int) -> None:
    given = strips.case(name, seed=rows)
    x = given.x(rows, rows)
    near(StripFew(given.strips)(x), given.reference(x))


def strip_stream(name: str, columns: int, sets: int) -> None:
    """On Hopper. Slots are taken again."""
    given = strips.case(name, seed=sets)
    if compute_capability(strips.CUDA) != SM:
        return
    layer = StripFew(given.strips)
    layer.multiprocessors = 2
    warps = given.strips.padded_columns // columns
    for rows in (8, 16, 32):
        x = given.x(rows - 1, sets)
        tile = StreamTile(rows, warps, columns, 2, 2, sets, watched=True)
        near(layer(x, tile=tile), given.reference(x))


def in_order(bits: int, k: int, rows: int) -> None:
    """On Hopper. Warpgroups have two tiles, or one and none."""
    if compute_capability(strips.CUDA) != SM:
        return
    layer = moved(random_layer(300, k, bits, 128, seed=bits), strips.CUDA)
    run = Ordered(to_strips(layer), watched=True)
    run.multiprocessors = 1
    x = strips.activations(rows, k, bits)
    near(run(x), linear_reference(x, layer))


def many_rows(tiles: Mapping[Any, Any], name: str, rows: int, splits: int) -> None:
    """Every tile. Hopper's are left alone on other cards."""
    if tiles is strip_gemm_hopper.TILES and compute_capability(strips.CUDA) != strip_gemm_hopper.SM:
        return
    layer = gemm_cases.layer_of(name, seed=rows)
    run = ManyRows(to_strips(layer), tiles)
    x = torch.randn(rows, layer.in_features, device=strips.CUDA).half()
    want = linear_reference(x, layer)
    for tile in tiles:
        near(run(x, plan=run.plan_for(rows, tile, splits)), want)


def backend(name: str, bits: int, rows: int) -> None:
    layer = test_linear_seed.on_gpu(bits=bits, n=70, k=256, group=64, kind="zeros")
    x = test_linear_seed.rows_of(rows, 256, seed=rows)
    way = next(each for each in BACKENDS if each.name == name)
    near(way.prepare(layer, torch.float16)(x), linear_reference(x, layer))


def carried_norm(dtype: torch.dtype, gated: bool) -> None:
    first = test_carried_norm.layer(128, 256, bias=True)
    second = test_carried_norm.layer(320, 128, bias=True)
    test_carried_norm.check(5, first, second, dtype, gated)


def attention(int8: bool, window: int | None) -> None:
    case = ragged([1, 1, 1], [3, 64, 300])
    error = test_attention_cuda.run(case, 4, 2, 64, "float16", int8, window)
    assert error < ATTENTION.allowed("float16")


def decode_heads(int8: bool) -> None:
    step = test_decode_heads.Step((3, 64, 0, 300), 512, 8, 2, 64)
    test_decode_heads.check(step, 64, "float16", int8, normed=True, window=100)


AMPERE, HOPPER = strip_gemm.TILES, strip_gemm_hopper.TILES
CASES: dict[str, Callable[[], None]] = {
    "attention/paged_decode.cu fp16": partial(attention, False, None),
    "attention/paged_decode.cu int8": partial(attention, True, 33),
    "attention/gather.cu": partial(test_static_prompts.test_slots_are_gathered, torch.float16),
    "attention/decode_heads.cu fp16": partial(decode_heads, False),
    "attention/decode_heads.cu int8": partial(decode_heads, True),
    "kv/write.cu": partial(test_kv_cuda.test_store, 5, 64, 9, 3, "float16", True),
    "kv/write.cu int8": partial(
        test_kv_cuda.test_int8_values_are_quantised_as_the_reference_does, 64, "float16"
    ),
    "kv/host_copy.cu": partial(test_host_copy.test_both_ways_as_torch_does, "odd_sizes", 3, 7),
    "kv/fetch.cu": partial(test_host_copy.test_few_bytes_are_fetched, 37),
    "kv/stage.cu": partial(test_stage_cuda.test_rows_and_padding_as_in_torch, 3, 4, 5),
    "kv/stage_prompts.cu": partial(test_static_prompts.test_staged_as_in_torch, 1000),
    "sampling/argmax.cu": partial(test_sampling_cuda.test_argmax, 300),
    "sampling/draw.cu": partial(test_sampling_cuda.test_draws_equal_the_reference, 300, 2.0),
    "sampling/edit.cu": test_sampling_cuda.test_edits_equal_the_engines_penalties,
    "elementwise/rows.cu norms": partial(test_rows_cuda.test_norms, 2, 576, "float16"),
    "elementwise/rows.cu silu": partial(test_rows_cuda.test_silu_mul, 2, 8, "float16"),
    "elementwise/embedding.cu": partial(
        test_rows_cuda.test_embedding_has_the_bits_of_gather_rows, 4, 77, 32, "offsets"
    ),
    "linear/strip_gemv.cu w4": partial(few_rows, "w4 g128", 1),
    "linear/strip_gemv.cu w4, 30 rows": partial(few_rows, "w4 g32 symmetric, odd K", 30),
    "linear/strip_gemv.cu w4, tails": partial(few_rows, "w4 g128 offsets, bias, ragged", 8),
    "linear/strip_gemv.cu w3": partial(few_rows, "w3 g128", 7),
    "linear/strip_gemv.cu w3, tails": partial(few_rows, "w3 g128 zeros, bias, ragged", 16),
    "linear/strip_gemv.cu norms": partial(carried_norm, torch.float16, False),
    "linear/strip_gemv.cu norms, gate": partial(carried_norm, torch.float32, True),
    "linear/strip_stream.cu w4": partial(strip_stream, "w4 g128", 256, 2),
    "linear/strip_stream.cu w3, tails": partial(
        strip_stream, "w3 g128 zeros, bias, ragged", 128, 1
    ),
    "linear/strip_order.cu w4": partial(in_order, 4, 2048, 32),
    "linear/strip_order.cu w3, x in turns": partial(in_order, 3, 4608, 40),
    "linear/w8_gemv.cu": partial(test_rows_cuda.test_w8_gemv, 9, 37, 256, 64, "float16"),
    "linear/w8_rows.cu": partial(test_rows_cuda.test_w8_rows, 33, 37, 64, "bfloat16"),
    "linear/seed_gemv.cu w4": partial(backend, "cuda.seed_gemv", 4, 1),
    "linear/seed_gemv.cu w4, 5 rows": partial(backend, "cuda.seed_w4_batch_tile", 4, 5),
    "linear/seed_gemv.cu w3": partial(backend, "cuda.seed_gemv", 3, 2),
    "linear/seed_gemm.cu w4": partial(backend, "cuda.seed_tiled", 4, 37),
    "linear/seed_gemm.cu w3": partial(backend, "cuda.seed_tiled", 3, 37),
    "linear/dequantise.cu": partial(backend, "cuda.dequantise_cublas", 4, 5),
    "linear/strip_dense.cu": partial(backend, "cuda.strip_cublas", 4, 5),
    "linear/strip_gemm.cu w4": partial(many_rows, AMPERE, "w4 g128", 65, 2),
    "linear/strip_gemm.cu w3, tails": partial(many_rows, AMPERE, "w3 g32 offsets, odd N", 17, 1),
    "linear/strip_gemm_hopper.cu w4": partial(many_rows, HOPPER, "w4 g128", 65, 2),
    "linear/strip_gemm_hopper.cu w3, tails": partial(
        many_rows, HOPPER, "w3 g32 offsets, odd N", 17, 1
    ),
    "pack/round_columns.cu": partial(
        test_round_columns.test_both_loops_round_as_plain_torch_does,
        Grid(4, 32, offsets=True),
        33,
    ),
}
"""By source, below kernels/."""


def run_all(cases: Mapping[str, Callable[[], None]], most_seconds: float) -> int:
    """How many failed or were left out because they would have begun too late."""
    started, missing = time.monotonic(), 0
    for name, case in cases.items():
        begun = time.monotonic()
        if begun - started > most_seconds:
            print(f"left out: {name}", flush=True)
            missing += 1
            continue
        try:
            case()
            torch.cuda.synchronize()
        except Exception:  # whatever it was: the tool's report of the other cases still counts
            traceback.print_exc(limit=-3)
            missing += 1
        print(f"{time.monotonic() - begun:6.1f} s  {name}", flush=True)
    print(f"{len(cases) - missing} of {len(cases)} cases ran and were right", flush=True)
    return missing


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every case ran and was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    late = "cases that would begin later are left out"
    parser.add_argument("--most-seconds", type=float, default=3600.0, help=late)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the cases' names")
    args = parser.parse_args(argv)
    chosen = {n: case for n, case in CASES.items() if any(part in n for part in args.only)}
    return 1 if run_all(chosen, args.most_seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
