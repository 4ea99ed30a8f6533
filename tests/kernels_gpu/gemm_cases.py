"""What both GEMM families must do, tile by tile: right sums for any shape, always the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels.jit.shipped import compile_all
from kernels.linear.gemm_plan import Plan
from kernels.linear.many_rows import ManyRows
from kernels.linear.op import LINEAR
from kernels.linear.reference import linear_reference
from kernels.linear.strip import to_strips
from kernels.linear.weights import moved
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.device import compute_capability
from tests.kernels_cpu.layers import random_layer

CUDA = torch.device("cuda", 0)
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 30, 37, 64, 65, 128, 257, 512)
SHARES = (1, 7)
"""Numbers of multiprocessors that may run, besides all."""
LAYERS: dict[str, dict[str, Any]] = {
    "w4 g128": {"n": 384, "k": 1024, "group": 128, "kind": "symmetric"},
    "w4 g64 offsets, ragged N": {"n": 1000, "k": 832, "group": 64, "bias": True},
    "w4 g32 zeros, odd N and K": {"n": 77, "k": 333, "kind": "zeros", "bias": True},
    "w4 whole row, act-order": {"n": 256, "k": 320, "group": -1, "perm": True},
    "w3 g128": {"n": 384, "k": 1024, "bits": 3, "group": 128, "kind": "symmetric"},
    "w3 g64 zeros, ragged K": {"n": 208, "k": 832, "bits": 3, "group": 64, "kind": "zeros"},
    "w3 g32 offsets, odd N": {"n": 1001, "k": 520, "bits": 3, "bias": True},
    "w3 whole row, odd K": {"n": 256, "k": 333, "bits": 3, "group": -1, "perm": True},
}


def layer_of(name: str, seed: int) -> PackedLinear:
    """On the GPU, with numbers of its own."""
    return moved(random_layer(**LAYERS[name], seed=seed), CUDA)


def compile_together(tiles: Mapping[Any, Any]) -> None:
    """All variants that the layers need, side by side: one by one they would take minutes."""
    sm = compute_capability(CUDA)
    needed = [
        (
            tile.variant(
                shape.get("bits", 4),
                max(shape.get("group", 32), 0),
                shape.get("kind", "offsets") != "symmetric",
            ),
            sm,
        )
        for shape in LAYERS.values()
        for tile in tiles
    ]
    compile_all(needed, workers=16)


def poison(like: torch.Tensor) -> None:
    """Leave NaN where torch's allocator will put the next tensor of this size."""
    torch.full_like(like, float("nan"))


def check_layer(name: str, tiles: Mapping[Any, Any], rows: int) -> None:
    """Against fp32 for every tile and for one, two and three splits of K; the share of the card
    that runs changes no bit.
    """
    layer = layer_of(name, seed=rows)
    run = ManyRows(to_strips(layer), tiles)
    x = torch.randn(rows, layer.in_features, device=CUDA).half()
    want = linear_reference(x, layer)
    for tile in tiles:
        for splits in (1, 2, 3):
            try:
                plan = run.plan_for(rows, tile, splits)
            except ValueError:
                continue  # K is too short for so many
            poison(want.half())
            y = run(x, plan=plan)
            error = float((y.float() - want).abs().max() / want.abs().max())
            # NaN is smaller than nothing: a value that nobody wrote does not pass.
            assert error < LINEAR.allowed("float16"), f"{tile}, {splits} splits: {error:.1e}"
            for share in SHARES:
                poison(y)
                again = run(x, plan=plan, max_ctas=share)
                assert torch.equal(again, y), f"{tile}, {splits} splits, {share} multiprocessors"


def check_whole_and_shared(tiles: Mapping[Any, Any]) -> None:
    """Some tiles whole, the others in shares of K: what a large product's last round is."""
    layer = layer_of("w4 g64 offsets, ragged N", seed=4)
    run = ManyRows(to_strips(layer), tiles)
    x = torch.randn(257, layer.in_features, device=CUDA).half()
    want = linear_reference(x, layer)
    for tile in tiles:
        count = -(-layer.out_features // tile.n) * -(-257 // tile.m)
        shared = count - count // 3
        plan = Plan(tile, count // 3, 2, count // 3 + 2 * shared, 2 * shared * tile.n * tile.m)
        poison(want.half())
        y = run(x, plan=plan)
        error = float((y.float() - want).abs().max() / want.abs().max())
        assert error < LINEAR.allowed("float16"), f"{tile}: {error:.1e}"
        for share in SHARES:
            assert torch.equal(run(x, plan=plan, max_ctas=share), y), f"{tile}, {share} of the card"
