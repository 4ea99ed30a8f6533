"""strip_batch.cu in every shape against the fp32 reference, up to 64 rows, K shared or not."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.strip_batch import BatchTile
from kernels.linear.strip_choice import Batch
from kernels.linear.strip_few import StripFew
from tests.kernels_gpu.strips import LAYERS, ROWS, Case, Poisoned, case, gated_case

pytestmark = pytest.mark.gpu
SHAPES = (
    Batch(BatchTile(16, row_warps=4, strips=1, k_warps=2, stages=3), 1),
    Batch(BatchTile(32, row_warps=4, strips=2, k_warps=1, stages=4), 3),
    Batch(BatchTile(32, row_warps=2, strips=2, k_warps=4, stages=2), 1),
    Batch(BatchTile(48, row_warps=3, strips=2, k_warps=2, stages=3), 2),
    Batch(BatchTile(64, row_warps=8, strips=1, k_warps=1, stages=3), 4),
    Batch(BatchTile(64, row_warps=2, strips=4, k_warps=2, stages=2), 1),
)
"""All heights, one to four strips a warp, warps along K or not, one to four shares of K."""


def run(shape: Batch, given: Case, x: torch.Tensor, **more: torch.Tensor) -> Poisoned:
    """Into a poisoned output. A layer of one step of K cannot be shared."""
    got = Poisoned(x.shape[0], given.layer.out_features)
    StripFew(given.strips)(x, out=got.y, choice=fitting(shape, given), **more)
    return got


def fitting(shape: Batch, given: Case) -> Batch:
    """At most one share a step."""
    return Batch(shape.tile, min(shape.splits, given.strips.steps))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_every_shape_equals_the_reference(name: str, shape: Batch) -> None:
    """All rows the shape has room for; fresh x each time."""
    given = case(name, seed=shape.splits)
    for seed, m in enumerate(m for m in ROWS if m <= shape.tile.rows):
        x = given.x(m, seed)
        run(shape, given, x).check(given.reference(x), f"M = {m}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_residual_is_added_last_and_may_be_the_output(shape: Batch) -> None:
    """A decoder's residual stream is updated in place."""
    given = case("w4 g128 offsets, bias, ragged", seed=3)
    m = shape.tile.rows
    x = given.x(m, 1)
    got = Poisoned(m, given.layer.out_features)
    before = torch.randn(got.y.shape, generator=torch.Generator().manual_seed(4)).half().cuda()
    got.y.copy_(before)
    StripFew(given.strips)(x, out=got.y, residual=got.y, choice=fitting(shape, given))
    got.check(given.reference(x) + before.float(), "in place")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [4, 3])
def test_gate_and_up_become_one(bits: int, shape: Batch) -> None:
    """silu(gate) * up with both biases, in the kernel."""
    given = gated_case(bits)
    x = given.x(shape.tile.rows - 1, bits)
    gate, up = given.reference(x).chunk(2, dim=-1)
    got = Poisoned(x.shape[0], gate.shape[1])
    StripFew(given.strips, gated=True)(x, out=got.y, choice=fitting(shape, given))
    got.check(torch.nn.functional.silu(gate) * up, "gated")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["w4 long K", "w3 g128 zeros, bias, ragged"])
def test_runs_are_equal_to_the_bit(name: str, shape: Batch) -> None:
    """Thirty launches back to back, whichever block arrives last; counters are zero again."""
    given = case(name, seed=7)
    x = given.x(shape.tile.rows, 7)
    layer = StripFew(given.strips)
    choice = fitting(shape, given)
    first = layer(x, choice=choice)
    again = [layer(x, choice=choice) for _ in range(30)]
    assert all(torch.equal(first, y) for y in again)
    assert not layer.arrivals.any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding_is_never_seen(shape: Batch) -> None:
    """Any codes behind K, NaN scales in rows behind N, NaN behind the last row of x."""
    given = case("w4 g128 offsets, bias, ragged", seed=5)
    m, k = shape.tile.rows - 1, given.layer.in_features
    room = torch.full((m + 2, k), float("nan"), dtype=torch.float16, device="cuda")
    room[:m] = given.x(m, 5)
    clean = run(shape, given, room[:m].clone())
    rows = given.layer.out_features % 16
    given.strips.scales[-1, :, rows:] = float("nan")
    blocks = given.strips.words.view(given.strips.strips, -1, 128)
    blocks[:, -(-k // 64) :] = -1
    dirty = run(shape, given, room[:m])
    assert torch.equal(clean.y, dirty.y)
