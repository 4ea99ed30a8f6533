"""What a grid can say: its bytes, its errors, its scales of both signs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.ops import PackedLinear, dequantise, pack_codes
from engine_actor.quant.grid import Grid, Steps, codes_of, half, half_scale, values_of
from engine_actor.quant.scale_search import absmax_steps, search_steps
from tests.quant.matrices import weight

GRIDS = [Grid(b, g, o) for b in (3, 4, 8) for g in (32, 64, 128, -1) for o in (False, True)]


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_code_comes_back_as_itself(bits, sign):
    grid = Grid(bits, -1)
    codes = torch.arange(grid.low, grid.high + 1).float().view(1, -1)
    scale = half_scale(torch.tensor([[sign * 0.37]]))
    assert torch.equal(codes_of(values_of(codes, scale, None), scale, None, grid), codes)


@settings(max_examples=60, deadline=None)
@given(
    grid=st.sampled_from(GRIDS),
    columns=st.integers(1, 200),
    seed=st.integers(0, 999),
    size=st.floats(1e-3, 1e3),
)
def test_absmax_is_within_half_a_step_of_every_weight(grid, columns, seed, size):
    values = weight(3, columns, seed) * size
    steps = absmax_steps(values, grid)
    scale, offset = steps.per_column(columns, grid.width(columns))
    rounded = values_of(codes_of(values, scale, offset, grid), scale, offset)
    # fp16 scales are a thousandth off at most, the smallest 2^-25, over a range of 2^bits steps; so
    # are fp16 offsets.
    slack = (scale.abs() * 1e-3 + 2.0**-25) * 2**grid.bits
    slack = slack if offset is None else slack + offset.abs() * 1e-3
    assert bool(((rounded - values).abs() <= scale.abs() / 2 + slack).all())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("columns", [576, 96, 33])
def test_the_bytes_of_a_grid_are_those_of_the_packed_linear(grid, columns):
    values = weight(5, columns, 1)
    steps = absmax_steps(values, grid)
    scale, offset = steps.per_column(columns, grid.width(columns))
    codes = codes_of(values, scale, offset, grid).to(torch.int8)
    packed = PackedLinear(
        grid.bits,
        grid.group,
        columns,
        pack_codes(codes, grid.bits),
        steps.scales.half(),
        offsets=None if steps.offsets is None else steps.offsets.half(),
    )
    assert packed.nbytes == grid.nbytes(5, columns)
    expected = values_of(codes.float(), scale, offset)
    assert torch.equal(dequantise(packed), expected)


def test_a_group_longer_than_the_row_is_the_row():
    values, most = weight(5, 96, 1), Grid(4, 2**40, offsets=True)
    assert (most.width(96), most.groups(96)) == (96, 1)
    whole = absmax_steps(values, Grid(4, -1, offsets=True))
    steps = absmax_steps(values, most)
    assert torch.equal(steps.scales, whole.scales)
    assert most.nbytes(5, 96) == Grid(4, -1, offsets=True).nbytes(5, 96)


@settings(max_examples=40, deadline=None)
@given(grid=st.sampled_from(GRIDS), columns=st.integers(8, 200), seed=st.integers(0, 999))
def test_a_search_is_never_worse_than_the_plain_rule(grid, columns, seed):
    values = weight(4, columns, seed)
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(seed)) + 0.01

    def error(steps: Steps) -> torch.Tensor:
        scale, offset = steps.per_column(columns, grid.width(columns))
        miss = values_of(codes_of(values, scale, offset, grid), scale, offset) - values
        return (miss.square() * importance).sum()

    found = error(search_steps(values, grid, importance))
    assert found <= error(absmax_steps(values, grid)) * (1 + 1e-4) + 1e-12


def test_a_group_whose_longest_tail_is_positive_gets_a_negative_scale():
    """The code -8 has no +8: with a negative scale it reaches +8 steps (seed layout, Q4_0 rule)."""
    values = torch.linspace(-7, 8, 16).repeat(2).view(1, -1) * 0.1
    steps = search_steps(values, Grid(4, 32))
    scale, _ = steps.per_column(32, 32)
    assert float(scale[0, 0]) < 0
    rounded = values_of(codes_of(values, scale, None, Grid(4, 32)), scale, None)
    assert torch.allclose(rounded, values, atol=2e-4)


def test_offsets_find_a_lattice_that_has_one():
    codes = torch.randint(-8, 8, (6, 64), generator=torch.Generator().manual_seed(3)).float()
    codes[:, ::32], codes[:, 1::32] = -8.0, 7.0
    values = codes * half(torch.tensor(0.0131)) + half(torch.tensor(0.21))
    steps = search_steps(values, Grid(4, 32, offsets=True))
    scale, offset = steps.per_column(64, 32)
    rounded = values_of(codes_of(values, scale, offset, Grid(4, 32, True)), scale, offset)
    assert torch.allclose(rounded, values, atol=2e-4)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_nothing_but_zeros_stays_zero_and_finite(grid):
    for steps in (absmax_steps(torch.zeros(2, 96), grid), search_steps(torch.zeros(2, 96), grid)):
        scale, offset = steps.per_column(96, grid.width(96))
        rounded = values_of(codes_of(torch.zeros(2, 96), scale, offset, grid), scale, offset)
        assert bool((rounded.abs() < 1e-4).all())
        assert bool(torch.isfinite(scale).all())


def test_scales_are_half_precision_numbers_of_either_sign():
    wild = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 3.1e-7, 1.7, -2.3, 1e9, -1e9])
    scales = half_scale(wild)
    assert torch.equal(scales, scales.half().float())
    assert bool((scales != 0).all())
    assert bool(torch.isfinite(scales).all())
    assert torch.equal(scales[5:] < 0, wild[5:] < 0)
