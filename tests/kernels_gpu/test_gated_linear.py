"""A fused gate and up that ends in silu(gate) * up, whatever kernel the number of rows gets."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.cuda import Cuda
from kernels.linear.op import LINEAR, LinearPolicy, prepare_gate_up
from kernels.linear.reference import linear_reference
from kernels.linear.strip import interleave_halves, to_strips
from kernels.linear.strip_dense import StripCublas
from kernels.linear.weights import linear_key, moved
from kernels.pack.packed_linear import PackedLinear
from tests.kernels_cpu.layers import random_layer
from tests.kernels_gpu.gemm_cases import CUDA, poison

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 8, 9, 33, 64, 65, 257)


def _layer(bits: int, bias: bool) -> PackedLinear:
    layer = random_layer(n=416, k=512, bits=bits, group=128, kind="symmetric", bias=bias)
    return moved(layer, CUDA)


def _reference(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    gate, up = linear_reference(x, layer).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "bias"), [(4, True), (4, False), (3, True)])
def test_every_number_of_rows(bits: int, bias: bool, dtype: torch.dtype) -> None:
    """Half as wide as W, in the activations' dtype."""
    layer = _layer(bits, bias)
    linear = prepare_gate_up(layer, LinearPolicy(CUDA, dtype))
    assert linear.gated
    for rows in ROWS:
        x = torch.randn(rows, 512, device=CUDA).to(dtype)
        want = _reference(x, layer)
        poison(want.half())
        got = linear(x)
        assert got.dtype == dtype
        assert got.shape == want.shape
        error = float((got.float() - want).abs().max() / want.abs().max())
        assert error < LINEAR.allowed(str(dtype).removeprefix("torch.")), rows


def test_a_dense_slice_is_gated_too() -> None:
    """The way through cuBLAS, with torch behind it."""
    layer = _layer(4, True)
    run = StripCublas().prepare_strips(to_strips(interleave_halves(layer)), torch.half, gated=True)
    x = torch.randn(130, 512, device=CUDA).half()
    want = _reference(x, layer)
    assert float((run(x).float() - want).abs().max() / want.abs().max()) < 4e-3


def test_a_layer_without_strips_is_refused() -> None:
    """8 bits, and a number of rows that cannot be interleaved."""
    for layer in (
        random_layer(n=64, k=128, bits=8, group=32, kind="symmetric"),
        random_layer(n=40, k=128, bits=4, group=32, kind="symmetric"),
    ):
        key = linear_key(moved(layer, CUDA), torch.float16, CUDA, exact=False)
        assert Cuda().refuse_gated(key) is not None
