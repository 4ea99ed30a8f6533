"""Room for split products is never less than what their plans ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_actor.model.step_bytes import StepShape, _scratch_bytes
from kernels.jit.counters import COUNTERS
from kernels.linear import strip_gemm, strip_gemm_hopper
from kernels.linear.gemm_plan import plan_units

SHAPES = {"0.5b": (896, 4864, 14, 2), "3b": (2048, 11008, 16, 2), "7b": (3584, 18944, 28, 4)}
ROWS = (65, 96, 128, 256, 385, 512, 776, 1928, 2048)


def shape_of(hidden: int, heads: int, kv_heads: int) -> StepShape:
    head_dim = 64 if hidden == 896 else 128
    model: Any = SimpleNamespace(
        hidden=hidden, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim
    )
    return StepShape(model, 1000, 2, 8, 256, 90, 3, 1, 16, True, in_strips=True)


@pytest.mark.parametrize("name", SHAPES)
def test_split_products_fit_their_room(name: str) -> None:
    hidden, inter, heads, kv_heads = SHAPES[name]
    shape = shape_of(hidden, heads, kv_heads)
    qkv = (heads + 2 * kv_heads) * shape.model.head_dim
    families: tuple[tuple[Any, int], ...] = (
        (strip_gemm_hopper.TILES, 132),
        (strip_gemm.TILES, 84),
        (strip_gemm.TILES, 16),
    )
    for tiles, multiprocessors in families:
        for n, k in ((qkv, hidden), (hidden, hidden), (2 * inter, hidden), (hidden, inter)):
            for rows in ROWS:
                plan = plan_units(
                    tiles,
                    rows,
                    n,
                    steps=-(-k // 64),
                    chunk_steps={tile: tile.chunk_steps(4) for tile in tiles},
                    multiprocessors=multiprocessors,
                    most_tiles_shared=COUNTERS,
                )
                assert 4 * plan.partials <= _scratch_bytes(shape, rows), (n, rows)
