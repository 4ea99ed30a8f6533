"""The mma.sync GEMM on strips against the fp32 reference, at shapes chosen by mechanism (S-24)."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.gemm_plan import limit_multiprocessors
from kernels.linear.many_rows import ManyRows
from kernels.linear.reference import linear_reference
from kernels.linear.strip import interleave_halves, to_strips
from kernels.linear.strip_gemm import TILES
from kernels.linear.weights import moved
from tests.kernels_cpu.layers import random_layer
from tests.kernels_gpu.gemm_cases import (
    CUDA,
    LAYERS,
    ROWS,
    check_layer,
    check_whole_and_shared,
    compile_together,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Every variant of the tests below."""
    compile_together(TILES)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("layer", LAYERS)
def test_equals_reference(layer: str, rows: int) -> None:
    """Every tile, every number of splits, every share of the card."""
    check_layer(layer, TILES, rows)


def test_whole_tiles_beside_shared_ones() -> None:
    check_whole_and_shared(TILES)


def test_gate_and_residual_in_the_epilogue() -> None:
    """silu(gate) * up + residual, and a residual alone."""
    layer = moved(random_layer(512, 640, 4, 128, "symmetric", bias=True, seed=3), CUDA)
    x = torch.randn(130, 640, device=CUDA).half()
    sums = linear_reference(x, layer)
    gate, up = sums.chunk(2, dim=-1)
    for silu, want in ((True, torch.nn.functional.silu(gate) * up), (False, sums)):
        strips = to_strips(interleave_halves(layer) if silu else layer)
        residual = torch.randn(want.shape, device=CUDA).half()
        y = ManyRows(strips, TILES, silu=silu)(x, residual=residual)
        torch.testing.assert_close(y.float(), want + residual.float(), rtol=3e-3, atol=6e-2)


def test_a_captured_call_gives_the_same_bits() -> None:
    """In a graph, with its scratch and counters, replayed; and with a limit set around it."""
    layer = moved(random_layer(256, 4096, 4, 128, "symmetric", seed=5), CUDA)
    run = ManyRows(to_strips(layer), TILES)
    x = torch.randn(65, 4096, device=CUDA).half()
    assert run.plan_for(65).splits > 1
    want = run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), limit_multiprocessors(5):
        y = run(x)
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, want)
