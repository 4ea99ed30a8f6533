"""The wgmma GEMM on strips against the fp32 reference; everywhere else it refuses (S-24)."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.many_rows import ManyRows
from kernels.linear.reference import linear_reference
from kernels.linear.strip import interleave_halves, to_strips
from kernels.linear.strip_gemm_hopper import SM, TILES, GemmHopper, HopperTile
from kernels.linear.weights import moved
from kernels.spec.device import compute_capability
from kernels.spec.op import OpKey
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
    """Every variant of the tests below, or nothing where the card is no Hopper."""
    key = OpKey("linear", "cuda", "float16", 128, 64, 64, 4, 64, sm=compute_capability(CUDA))
    if GemmHopper().refuse(key) is not None:
        pytest.skip(f"not sm_{SM}")
    compile_together(TILES)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("layer", LAYERS)
def test_equals_reference(layer: str, rows: int) -> None:
    """Every tile, every number of splits, every share of the card."""
    check_layer(layer, TILES, rows)


def test_whole_tiles_beside_shared_ones() -> None:
    check_whole_and_shared(TILES)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.n}x{tile.m}")
def test_gate_and_residual_in_the_epilogue(tile: HopperTile) -> None:
    """silu(gate) * up + residual."""
    layer = moved(random_layer(512, 640, 4, 128, "symmetric", bias=True, seed=3), CUDA)
    x = torch.randn(130, 640, device=CUDA).half()
    gate, up = linear_reference(x, layer).chunk(2, dim=-1)
    residual = torch.randn(130, 256, device=CUDA).half()
    run = ManyRows(to_strips(interleave_halves(layer)), TILES, silu=True)
    y = run(x, residual=residual, plan=run.plan_for(130, tile))
    want = torch.nn.functional.silu(gate) * up + residual.float()
    torch.testing.assert_close(y.float(), want, rtol=3e-3, atol=6e-2)


@pytest.mark.parametrize("rows", [17, 64, 200])
def test_a_chain_may_overlap_its_launches(rows: int) -> None:
    """Each call reads what the one before wrote, adds it as residual, and may start before it ends:
    the same bits as one launch at a time, also when captured in a graph.
    """
    layer = moved(random_layer(1024, 1024, 4, 128, "symmetric", seed=6), CUDA)
    layer.scales.mul_(1 / 16)  # twenty sums of what came before stay in fp16's range
    run = ManyRows(to_strips(layer), TILES)
    x = torch.randn(rows, 1024, device=CUDA).half()

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for _ in range(20):
            y = run(y, residual=y)
            if wait:
                torch.cuda.synchronize()
        return y

    want = chain(wait=True)
    assert want.isfinite().all()
    assert torch.equal(chain(wait=False), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(wait=False)
    got.fill_(float("nan"))
    graph.replay()
    assert torch.equal(got, want)
