"""strip_stream.cu in every shape against the fp32 reference (sm_90)."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.reference import linear_reference
from kernels.linear.strip import interleave_halves, to_strips
from kernels.linear.strip_few import StripFew
from kernels.linear.strip_gemv import GemvTile
from kernels.linear.strip_stream import SM, StreamTile
from kernels.linear.strip_stream_rows import Stream, StreamRows
from kernels.linear.weights import linear_key, moved
from kernels.spec.device import compute_capability
from tests.kernels_cpu.layers import random_layer
from tests.kernels_gpu import test_carried_norm
from tests.kernels_gpu.strips import (
    CUDA,
    LAYERS,
    Case,
    Poisoned,
    activations,
    case,
    gated_case,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(compute_capability(CUDA) != SM, reason="compiled for sm_90a"),
]
NAMES = [name for name in LAYERS if "g64" in name or "g128" in name]
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 24, 33)
Shape = tuple[int, int, int]
SHAPES: list[Shape] = [
    (8, 256, 1),
    (16, 256, 1),
    (8, 128, 1),
    (16, 128, 3),
    (8, 128, 3),
    (8, 256, 2),
    (24, 128, 1),
    (32, 256, 1),
]
"""Rows of x there is room for, columns of a warp, sets of warps."""


def tile_for(given: Case, shape: Shape, turns: int) -> StreamTile:
    """Skips what the layer's columns do not allow."""
    rows, columns, sets = shape
    warps, rest = divmod(given.strips.padded_columns, columns)
    if rest or warps * sets > 16:
        pytest.skip(f"{given.strips.padded_columns} columns")
    return StreamTile(rows, warps, columns, turns, turns * sets - 1, sets)


def layer_of(given: Case, multiprocessors: int, gated: bool = False) -> StripFew:
    """On a card of so many multiprocessors, so that a block has few strips or many."""
    layer = StripFew(given.strips, gated)
    layer.multiprocessors = multiprocessors
    return layer


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 132])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_shape_equals_the_reference(name: str, shape: Shape, multiprocessors: int) -> None:
    """Slots taken again and again, blocks without a strip, rows in one turn and in several."""
    given = case(name, seed=multiprocessors)
    tile = tile_for(given, shape, turns=2)
    for seed, m in enumerate(ROWS):
        x = given.x(m, seed)
        got = Poisoned(m, given.layer.out_features)
        layer_of(given, multiprocessors)(x, out=got.y, tile=tile)
        got.check(given.reference(x), f"M = {m}")


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_and_up_become_one(shape: Shape, bits: int) -> None:
    """silu(gate) * up with both biases, in the kernel."""
    given = gated_case(bits)
    tile = tile_for(given, shape, turns=3)
    x = given.x(tile.rows - 1, bits)
    gate, up = given.reference(x).chunk(2, dim=-1)
    got = Poisoned(x.shape[0], gate.shape[1])
    layer_of(given, 2, gated=True)(x, out=got.y, tile=tile)
    got.check(torch.nn.functional.silu(gate) * up, "gated")


@pytest.mark.parametrize("name", ["w4 g128", "w3 g128"])
def test_residual_is_added_last_and_may_be_the_output(name: str) -> None:
    """A residual stream is updated in place."""
    given = case(name, seed=3)
    x = given.x(8, 1)
    got = Poisoned(8, given.layer.out_features)
    before = torch.randn(got.y.shape, generator=torch.Generator().manual_seed(4)).half().cuda()
    got.y.copy_(before)
    tile = tile_for(given, SHAPES[0], turns=2)
    layer_of(given, 3)(x, out=got.y, residual=got.y, tile=tile)
    got.check(given.reference(x) + before.float(), "in place")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["w4 g128", "w3 g128 zeros, bias, ragged"])
def test_runs_are_equal_to_the_bit(name: str, shape: Shape) -> None:
    """Thirty launches back to back: a race would show."""
    given = case(name, seed=7)
    tile = tile_for(given, shape, turns=2)
    x, layer = given.x(tile.rows, 7), layer_of(given, 2)
    first = layer(x, tile=tile)
    again = [layer(x, tile=tile) for _ in range(30)]
    assert all(torch.equal(first, y) for y in again)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding_is_never_seen(shape: Shape) -> None:
    """Any codes behind K, NaN scales in rows behind N, NaN behind the last row of x."""
    given = case("w4 g128 offsets, bias, ragged", seed=5)
    tile = tile_for(given, shape, turns=3)
    m, k = tile.rows - 1, given.layer.in_features
    room = torch.full((m + 2, k), float("nan"), dtype=torch.float16, device="cuda")
    room[:m] = given.x(m, 5)
    clean = layer_of(given, 5)(room[:m].clone(), tile=tile)
    given.strips.scales[-1, :, given.layer.out_features % 16 :] = float("nan")
    given.strips.words.view(given.strips.strips, -1, 128)[:, -(-k // 64) :] = -1
    dirty = layer_of(given, 5)(room[:m], tile=tile)
    assert torch.equal(clean, dirty)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("name", ["w4 g128", "w3 g128"])
def test_small_x_keeps_what_counts(name: str, shape: Shape) -> None:
    """Of W3, x is divided by up to 64, which costs numbers so small some bits."""
    given = case(name, seed=9)
    tile = tile_for(given, shape, turns=2)
    x = (given.x(tile.rows, 9).float() / 500).half()
    got = Poisoned(tile.rows, given.layer.out_features)
    layer_of(given, 3)(x, out=got.y, tile=tile)
    got.check(given.reference(x), "small x")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["symmetric", "zeros"])
@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("n", "k"), [(336, 2048), (6000, 1944)])
def test_17_to_32_rows_by_the_backend(n: int, k: int, bits: int, kind: str, gated: bool) -> None:
    """Warps that multiply have more registers than the others."""
    layer = random_layer(n, k, bits, 128, kind, bias=True, seed=n + bits)
    backend = StreamRows()
    assert backend.refuse(linear_key(moved(layer, CUDA), torch.float16, CUDA, exact=False)) is None
    strips = to_strips(moved(interleave_halves(layer) if gated else layer, CUDA))
    run = backend.prepare_strips(strips, torch.float16, gated=gated)
    assert isinstance(run, Stream)
    for m in (17, 24, 25, 31, 32, 50):
        x = activations(m, k, m)
        want = linear_reference(x, moved(layer, CUDA))
        if gated:
            gate, up = want.chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
        got = Poisoned(m, want.shape[1])
        assert torch.equal(run(x, out=got.y), run(x))
        got.check(want, f"M = {m}")
        more = torch.randn_like(got.y)
        assert torch.equal(run(x, residual=more, out=more.clone()), run(x, residual=more))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [4, 3])
def test_a_norm_is_in_the_product(bits: int, gated: bool) -> None:
    """As in the kernel for narrow layers, the next lift included."""
    packed = test_carried_norm.layer(320, 2048, bias=True, bits=bits)
    takes = StripFew(to_strips(interleave_halves(packed) if gated else packed), gated)
    for rows in (1, 3, 4):
        stream = (torch.randn(rows, 2048, device=CUDA) * 3).half()
        by = test_carried_norm.weight(2048)
        found = []
        for multiprocessors, kind in ((1000, GemvTile), (2, StreamTile)):
            takes.multiprocessors = multiprocessors
            tile = takes._tile(rows)
            assert isinstance(tile, kind)
            carry = test_carried_norm.left(stream, by)
            found.append((takes.normed(carry, tile=tile), *carry.lifts))
        (want, *lifts), (got, *same_lifts) = found
        test_carried_norm.near(got, want)
        assert all(torch.equal(a, b) for a, b in zip(lifts, same_lifts, strict=True))


@pytest.mark.parametrize("bits", [4, 3])
def test_gate_and_up_of_a_step_stream_by(bits: int) -> None:
    """Unasked, with room for 8 and for 16 rows."""
    packed = test_carried_norm.layer(320, 3584, bias=True, bits=bits)
    takes = StripFew(to_strips(interleave_halves(packed)), gated=True)
    by = test_carried_norm.weight(3584)
    for rows in (1, 4, 8, 13):
        stream = (torch.randn(rows, 3584, device=CUDA) * 3).half()
        found = []
        for multiprocessors, kind in ((1000, GemvTile), (1, StreamTile)):
            takes.multiprocessors = multiprocessors
            assert isinstance(takes._normed_tile(rows), kind)
            carry = test_carried_norm.left(stream, by)
            found.append((takes.normed(carry), *carry.lifts))
        (want, *lifts), (got, *same_lifts) = found
        test_carried_norm.near(got, want)
        assert all(torch.equal(a, b) for a, b in zip(lifts, same_lifts, strict=True))
