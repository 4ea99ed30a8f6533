"""strip_gemv.cu in every shape against the fp32 reference, few rows and many."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.strip_few import StripFew
from kernels.linear.strip_gemv import GemvTile
from tests.kernels_gpu.strips import LAYERS, ROWS, Case, Poisoned, case, gated_case

pytestmark = pytest.mark.gpu
TILES = (
    GemvTile(8, warps=4, unroll=1),
    GemvTile(8, warps=16, unroll=2, prefetch=True),
    GemvTile(8, warps=2, unroll=4, strips=2),
    GemvTile(16, warps=16, unroll=1),
    GemvTile(16, warps=8, unroll=1, strips=2, prefetch=True),
    GemvTile(16, warps=4, unroll=2, strips=4),
    GemvTile(24, warps=3, unroll=1, strips=3),
    GemvTile(32, warps=4, unroll=1, strips=2, prefetch=True),
    GemvTile(32, warps=16, unroll=1),
    GemvTile(8, warps=4, unroll=1, signed=True),
    GemvTile(16, warps=4, unroll=1, strips=2, signed=True),
)
"""One to four eights of rows, one to four strips a block, one to four steps a turn, asked for early
or not, codes bare and signed.
"""


def named(tile: GemvTile) -> str:
    """A test id."""
    early = "-early" if tile.prefetch else ""
    shape = f"rows{tile.rows}-warps{tile.warps}-unroll{tile.unroll}-strips{tile.strips}"
    return f"{shape}{early}{'-signed' if tile.signed else ''}"


def run(tile: GemvTile, given: Case, x: torch.Tensor, **more: torch.Tensor) -> Poisoned:
    """Into a poisoned output."""
    got = Poisoned(x.shape[0], given.layer.out_features)
    StripFew(given.strips)(x, out=got.y, tile=tile, **more)
    return got


@pytest.mark.parametrize("tile", TILES, ids=named)
@pytest.mark.parametrize("name", LAYERS)
def test_every_shape_equals_the_reference(name: str, tile: GemvTile) -> None:
    """Rows in one turn and in several; fresh x each time."""
    given = case(name, seed=tile.warps)
    for seed, m in enumerate(ROWS):
        x = given.x(m, seed)
        run(tile, given, x).check(given.reference(x), f"M = {m}")


@pytest.mark.parametrize("tile", TILES, ids=named)
def test_residual_is_added_last_and_may_be_the_output(tile: GemvTile) -> None:
    """A decoder's residual stream is updated in place."""
    given = case("w4 g128 offsets, bias, ragged", seed=3)
    x = given.x(tile.rows, 1)
    got = Poisoned(tile.rows, given.layer.out_features)
    before = torch.randn(got.y.shape, generator=torch.Generator().manual_seed(4)).half().cuda()
    got.y.copy_(before)
    StripFew(given.strips)(x, out=got.y, residual=got.y, tile=tile)
    got.check(given.reference(x) + before.float(), "in place")


@pytest.mark.parametrize("tile", TILES, ids=named)
@pytest.mark.parametrize("bits", [4, 3])
def test_gate_and_up_become_one(bits: int, tile: GemvTile) -> None:
    """silu(gate) * up with both biases, in the kernel."""
    given = gated_case(bits)
    x = given.x(tile.rows - 1, bits)
    gate, up = given.reference(x).chunk(2, dim=-1)
    got = Poisoned(x.shape[0], gate.shape[1])
    StripFew(given.strips, gated=True)(x, out=got.y, tile=tile)
    got.check(torch.nn.functional.silu(gate) * up, "gated")


@pytest.mark.parametrize("tile", TILES, ids=named)
@pytest.mark.parametrize("name", ["w4 long K", "w3 g128 zeros, bias, ragged"])
def test_runs_are_equal_to_the_bit(name: str, tile: GemvTile) -> None:
    """Thirty launches back to back: a race between warps would show."""
    given = case(name, seed=7)
    x = given.x(tile.rows, 7)
    layer = StripFew(given.strips)
    first = layer(x, tile=tile)
    again = [layer(x, tile=tile) for _ in range(30)]
    assert all(torch.equal(first, y) for y in again)


@pytest.mark.parametrize("tile", TILES, ids=named)
def test_padding_is_never_seen(tile: GemvTile) -> None:
    """Any codes behind K, NaN scales in rows behind N, NaN behind the last row of x."""
    given = case("w4 g128 offsets, bias, ragged", seed=5)
    m, k = tile.rows - 1, given.layer.in_features
    room = torch.full((m + 2, k), float("nan"), dtype=torch.float16, device="cuda")
    room[:m] = given.x(m, 5)
    clean = run(tile, given, room[:m].clone())
    rows = given.layer.out_features % 16
    given.strips.scales[-1, :, rows:] = float("nan")
    blocks = given.strips.words.view(given.strips.strips, -1, 128)
    blocks[:, -(-k // 64) :] = -1
    dirty = run(tile, given, room[:m])
    assert torch.equal(clean.y, dirty.y)
