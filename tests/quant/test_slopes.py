"""Gradients through a grid and from a recorded step, against autograd over the plain formula."""

from __future__ import annotations

import pytest
import torch

from engine_actor.quant.grid import Grid, half, half_scale
from engine_actor.quant.gridded import Gridded
from engine_actor.quant.slopes import Slopes


def _passed(rounded, values):
    return values + (rounded - values).detach()


def _plain(latent, change, shift, start, offsets, grid):
    """The same as a chain of operations, each with its gradient passed through."""
    columns, width = latent.shape[1], grid.width(latent.shape[1])
    wanted = start * (1 + change)
    scales = _passed(half_scale(wanted.detach()), wanted)
    codes = _passed(latent.detach().round().clamp(grid.low, grid.high), latent)
    values = codes * scales.repeat_interleave(width, 1)[:, :columns]
    if offsets is None:
        return values
    moved = offsets + start * shift
    moved = _passed(half(moved.detach()), moved)
    return values + moved.repeat_interleave(width, 1)[:, :columns]


@pytest.mark.parametrize("grid", [Grid(3, 16), Grid(4, 16, offsets=True), Grid(4, -1)], ids=str)
def test_values_and_slopes_are_those_of_the_plain_chain(grid):
    draw = torch.Generator().manual_seed(1)
    rows, columns = 5, 40
    shape = (rows, grid.groups(columns))
    latent = (4 * torch.randn(rows, columns, generator=draw)).requires_grad_()
    change = (0.1 * torch.randn(shape, generator=draw)).requires_grad_()
    shift = torch.randn(shape, generator=draw, requires_grad=grid.offsets)
    start = half(torch.randn(shape, generator=draw))
    offsets = half(torch.randn(shape, generator=draw)) if grid.offsets else None
    pull = torch.randn(rows, columns, generator=draw)
    leaves = [latent, change, *([shift] if grid.offsets else [])]
    found = Gridded.apply(latent, change, shift, start, offsets, grid)
    expected = _plain(latent, change, shift, start, offsets, grid)
    assert torch.allclose(found, expected, atol=1e-6)
    slopes = torch.autograd.grad((found * pull).sum(), leaves)
    for ours, theirs in zip(
        slopes, torch.autograd.grad((expected * pull).sum(), leaves), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)
        assert ours.is_contiguous()


def test_kept_codes_get_no_slope():
    codes = torch.tensor([[1, -2, 3, 0]], dtype=torch.int8)
    change = torch.zeros(1, 2, requires_grad=True)
    start = torch.tensor([[0.5, 2.0]])
    found = Gridded.apply(codes, change, torch.zeros(1, 2), start, None, Grid(4, 2))
    assert found.tolist() == [[0.5, -1.0, 6.0, 0.0]]
    (slope,) = torch.autograd.grad(found.sum(), [change])
    assert slope.tolist() == [[-0.5, 6.0]]


def _slopes(capture):
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)

    def loss(hidden, wanted):
        return ((hidden * leaf - wanted) ** 2).sum()

    return leaf, Slopes(loss, [leaf], torch.zeros(3, 2), capture)


def _expected(leaf, hidden, wanted):
    miss = hidden * leaf.detach() - wanted
    return float(miss.square().sum()), (2 * miss * hidden).sum(0)


@pytest.mark.parametrize("kind", ["none", "recorded", "refused"])
def test_every_batch_has_its_own_slopes_however_it_runs(kind):
    captured = []

    def record(run):
        captured.append(run)
        if kind == "refused":
            raise RuntimeError("operation not permitted when stream is capturing")
        return run

    leaf, slopes = _slopes(None if kind == "none" else record)
    draw = torch.Generator().manual_seed(2)
    for _ in range(3):
        hidden, wanted = torch.randn(2, 3, 2, generator=draw)
        value, slope = _expected(leaf, hidden, wanted)
        assert slopes(hidden, wanted) == pytest.approx(value, rel=1e-5)
        assert torch.allclose(leaf.grad, slope, atol=1e-5)
    assert len(captured) == (kind != "none")
