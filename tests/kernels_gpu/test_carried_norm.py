"""Norms that the products around them take upon themselves, against products and norms apart."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kernels.elementwise.cuda import leave_norm
from kernels.elementwise.op import rms_norm_reference
from kernels.linear.carry import Carry, refuse_carry
from kernels.linear.reference import linear_reference
from kernels.linear.strip import interleave_halves, to_strips
from kernels.linear.strip_few import StripFew
from kernels.linear.weights import moved
from kernels.pack.packed_linear import PackedLinear
from tests.kernels_cpu.layers import random_layer
from tests.kernels_gpu.strips import CUDA, ROWS

pytestmark = pytest.mark.gpu
EPS = 1e-6
STREAMS = [torch.float16, torch.float32]


@cache
def layer(n: int, k: int, bias: bool = False, bits: int = 4, group: int = 128) -> PackedLinear:
    kind = "symmetric" if group == 128 else "offsets"
    return moved(random_layer(n, k, bits, group, kind, bias=bias, seed=n + k), CUDA)


def weight(width: int) -> torch.Tensor:
    return torch.rand(width, device=CUDA) + 0.5


def left(stream: torch.Tensor, by: torch.Tensor) -> Carry:
    """As the first kernel of a step leaves it; everything else is poison."""
    carry = Carry.of(stream, EPS)
    for tensor in (carry.x, carry.squares, *carry.lifts):
        tensor.fill_(torch.nan)
    leave_norm(stream, by, EPS, carry.x, carry.squares, carry.lifts[0])
    return carry


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.float() - want).abs().max() < 4e-3 * want.abs().max()


@pytest.mark.parametrize("dtype", STREAMS)
@pytest.mark.parametrize("width", [64, 576, 2048])
def test_a_stream_is_left_for_a_product(width: int, dtype: torch.dtype) -> None:
    """The lift is a power of two by which values are small."""
    for rows in (1, 5, 64):
        stream, by = (torch.randn(rows, width, device=CUDA) * 7).to(dtype), weight(width)
        carry = left(stream, by)
        lift = carry.lifts[0]
        assert torch.equal(lift.log2(), lift.log2().round())
        want = stream.float() * by * lift.unsqueeze(1)
        torch.testing.assert_close(carry.x.float(), want, rtol=1e-3, atol=1e-6)
        sums = stream.float().square().view(rows, -1, 16).sum(-1)
        torch.testing.assert_close(carry.squares, sums, rtol=1e-5, atol=0)
        assert ((stream.float().square().mean(1).sqrt() * lift - 3 / 64).abs() < 1.01 / 64).all()


def check(
    rows: int, first: PackedLinear, second: PackedLinear, dtype: torch.dtype, gated: bool
) -> None:
    """A norm, a product, the residual add, the next norm, the next product; twice over, so that
    the lifts take turns."""
    width = first.out_features
    adds = StripFew(to_strips(first))
    takes = StripFew(to_strips(interleave_halves(second) if gated else second), gated)
    stream = (torch.randn(rows, width, device=CUDA) * 3).to(dtype)
    # A copy: what is fp32 already is not copied by float(), and the stream changes in place.
    carry, want_stream = left(stream, weight(width)), stream.float().clone()
    for turn in range(3):
        by = weight(width)
        x = torch.randn(rows, first.in_features, device=CUDA).half()
        if turn == 1:
            x *= 30  # the lift is that of a stream a tenth the size
        adds.add_to(carry, x, by)
        want_stream = want_stream + linear_reference(x, first)
        near(stream, want_stream)
        want_stream = stream.float().clone()
        got = takes.normed(carry)
        want = linear_reference(rms_norm_reference(stream, by, EPS), second)
        if gated:
            gate, up = want.chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
        near(got, want)


@pytest.mark.parametrize("dtype", STREAMS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(rows: int, gated: bool, dtype: torch.dtype) -> None:
    check(rows, layer(576, 384, bias=True), layer(960, 576, bias=True), dtype, gated)


@pytest.mark.parametrize("rows", [1, 8, 13, 32])
@pytest.mark.parametrize(
    ("width", "n", "k"), [(2048, 2560, 2048), (512, 13_312, 1408), (3584, 4608, 512)]
)
def test_blocks_of_every_shape(width: int, n: int, k: int, rows: int) -> None:
    """As few and as many strips for each multiprocessor of a large card as models have."""
    check(rows, layer(width, k), layer(n, width, bias=True), torch.float32, gated=n > 10_000)


def test_three_bits_and_small_groups() -> None:
    for bits, group in ((3, 128), (3, 32), (4, 32)):
        first, second = (layer(n, 512, bits=bits, group=group) for n in (512, 320))
        check(5, first, second, torch.float16, gated=False)


def test_a_stream_beyond_half_precision() -> None:
    """A value of 3e5 among others of one, in fp32."""
    stream, by = torch.randn(4, 512, device=CUDA), weight(512)
    stream[:, 7] = 3e5
    second = layer(320, 512)
    got = StripFew(to_strips(second)).normed(left(stream, by))
    near(got, linear_reference(rms_norm_reference(stream, by, EPS), second))


def test_what_is_refused() -> None:
    assert refuse_carry(torch.empty(1, 64, dtype=torch.bfloat16)) is not None
    assert refuse_carry(torch.empty(1, 96, dtype=torch.float16)) is not None
    assert refuse_carry(torch.empty(1, 128)) is None
    assert StripFew(to_strips(layer(96, 128))).refuse_carry() is not None
    assert StripFew(to_strips(layer(128, 128))).refuse_carry() is None
