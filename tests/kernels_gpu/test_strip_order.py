"""strip_order.cu against the fp32 reference (sm_90)."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.reference import linear_reference
from kernels.linear.strip import interleave_halves, to_strips
from kernels.linear.strip_order import SM, Ordered, OrderedRows
from kernels.linear.weights import linear_key, moved
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.device import compute_capability
from tests.kernels_cpu.layers import random_layer
from tests.kernels_gpu.strips import CUDA, Poisoned, activations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(compute_capability(CUDA) != SM, reason="compiled for sm_90a"),
]
ROWS = (1, 9, 17, 24, 32, 33, 37, 64, 70)


def layer_of(n: int, k: int, bits: int, kind: str, bias: bool = False) -> PackedLinear:
    return moved(random_layer(n, k, bits, 128, kind, bias=bias, seed=n + k + bits), CUDA)


def ordered(layer: PackedLinear, multiprocessors: int, gated: bool = False) -> Ordered:
    """On a card of so many multiprocessors, so that a warpgroup has one tile or several."""
    backend = OrderedRows()
    assert backend.refuse(linear_key(layer, torch.float16, CUDA, exact=False)) is None
    strips = to_strips(interleave_halves(layer) if gated else layer)
    run = backend.prepare_strips(strips, torch.float16, gated=gated)
    assert isinstance(run, Ordered)
    run.multiprocessors = multiprocessors
    return run


@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
@pytest.mark.parametrize("kind", ["symmetric", "zeros"])
@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (1003, 1024),  # all of x stays
        (330, 2040),  # a tail of K
        (517, 3584),  # it takes turns
        (140, 9216),
    ],
)
def test_equals_the_reference(n: int, k: int, bits: int, kind: str, multiprocessors: int) -> None:
    """One round of tiles and several, warpgroups without a tile among those that have one."""
    layer = layer_of(n, k, bits, kind, bias=kind == "zeros")
    run = ordered(layer, multiprocessors)
    for m in ROWS:
        x = activations(m, k, m)
        got = Poisoned(m, n)
        run(x, out=got.y)
        got.check(linear_reference(x, layer), f"M = {m}")


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("rows", [31, 60])
def test_gate_and_up_become_one(rows: int, bits: int) -> None:
    """silu(gate) * up with both biases, in the kernel."""
    layer = layer_of(336, 2048, bits, "offsets", bias=True)
    x = activations(rows, 2048, bits)
    gate, up = linear_reference(x, layer).chunk(2, dim=-1)
    got = Poisoned(rows, gate.shape[1])
    ordered(layer, 2, gated=True)(x, out=got.y)
    got.check(torch.nn.functional.silu(gate) * up, "gated")


@pytest.mark.parametrize("n", [256, 203])
def test_residual_is_added_last_and_may_be_the_output(n: int) -> None:
    """By pairs, and one by one where rows of y begin at odd places."""
    layer = layer_of(n, 1024, 4, "symmetric", bias=True)
    x = activations(20, 1024, n)
    got = Poisoned(20, n)
    before = activations(20, n, 4)
    got.y.copy_(before)
    ordered(layer, 3)(x, out=got.y, residual=got.y)
    got.check(linear_reference(x, layer) + before.float(), "in place")


@pytest.mark.parametrize("rows", [32, 50])
@pytest.mark.parametrize("k", [2048, 9216])
@pytest.mark.parametrize("bits", [4, 3])
def test_runs_are_equal_to_the_bit(bits: int, k: int, rows: int) -> None:
    """Thirty launches back to back: a race would show."""
    layer = layer_of(512, k, bits, "symmetric")
    x = activations(rows, k, 1)
    run = ordered(layer, 2)
    first = run(x)
    again = [run(x) for _ in range(30)]
    assert all(torch.equal(first, y) for y in again)


@pytest.mark.parametrize("bits", [4, 3])
def test_padding_is_never_seen(bits: int) -> None:
    """NaN behind the last row of x, NaN scales in rows behind N."""
    layer = layer_of(203, 1024, bits, "symmetric")
    room = torch.full((34, 1024), float("nan"), dtype=torch.float16, device="cuda")
    room[:29] = activations(29, 1024, 5)
    run = ordered(layer, 5)
    clean = run(room[:29].clone())
    run.weights.scales[-1, :, 203 % 16 :] = float("nan")
    assert torch.equal(clean, run(room[:29]))
