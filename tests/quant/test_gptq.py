"""GPTQ against the definition of optimal brain quantisation, written down naively in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.quant.gptq import Curvature, gptq
from engine_actor.quant.grid import Grid, Steps, codes_of, values_of
from engine_actor.quant.refine import descend, objective, refine, refit_steps
from engine_actor.quant.scale_search import search_steps
from tests.quant.matrices import hessian, weight

DAMP = 0.01


def _double(steps: Steps) -> Steps:
    return Steps(steps.scales.double(), None if steps.offsets is None else steps.offsets.double())


def _naive(w, h, order, steps, grid):
    """One column at a time: round it, spread its error over the rest by the inverse Hessian, then
    take the column out of the inverse (the OBS update of Hassibi and Stork).
    """
    w, codes = w.clone(), torch.zeros_like(w)
    inverse = torch.linalg.inv(h)
    width = grid.width(w.shape[1])
    for k in order:
        scale = steps.scales[:, k // width]
        offset = 0.0 if steps.offsets is None else steps.offsets[:, k // width]
        codes[:, k] = ((w[:, k] - offset) / scale).round().clamp(grid.low, grid.high)
        error = (w[:, k] - (codes[:, k] * scale + offset)) / inverse[k, k]
        w -= error[:, None] * inverse[k][None]
        inverse = inverse - torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return codes


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    columns=st.integers(2, 40),
    bits=st.sampled_from([3, 4]),
    offsets=st.booleans(),
    act_order=st.booleans(),
)
def test_it_is_the_naive_algorithm(seed, columns, bits, offsets, act_order):
    grid = Grid(bits, 16, offsets)
    w, h = weight(5, columns, seed, torch.float64), hessian(columns, seed, dtype=torch.float64)
    steps = _double(search_steps(w.float(), grid))
    diagonal = h.diagonal().clone()
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    damped = h + DAMP * diagonal.mean() * torch.eye(columns, dtype=torch.float64)
    curvature = Curvature.of(h.clone(), DAMP, act_order)
    codes = gptq(w, curvature, steps, grid)
    assert torch.equal(codes, _naive(w, damped, order.tolist(), steps, grid))


def test_blocks_change_nothing():
    """More columns than a block, in both orders, against the naive algorithm."""
    grid = Grid(4, 64)
    w, h = weight(3, 300, 7, torch.float64), hessian(300, 7, 900, torch.float64)
    steps = _double(search_steps(w.float(), grid))
    damped = h + DAMP * h.diagonal().mean() * torch.eye(300, dtype=torch.float64)
    for act_order in (True, False):
        curvature = Curvature.of(h.clone(), DAMP, act_order)
        codes = gptq(w, curvature, steps, grid)
        assert torch.equal(codes, _naive(w, damped, curvature.order.tolist(), steps, grid))


def _rounded(codes, steps, grid):
    columns = codes.shape[1]
    return values_of(codes, *steps.per_column(columns, grid.width(columns)))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    columns=st.sampled_from([48, 100, 160]),
    grid=st.sampled_from([Grid(3, 32), Grid(4, 64), Grid(4, 128), Grid(3, 32, True)]),
)
def test_its_error_is_below_that_of_rounding_and_refining_only_lowers_it(seed, columns, grid):
    w, h = weight(16, columns, seed), hessian(columns, seed)
    curvature = Curvature.of(h, DAMP)
    steps = search_steps(w, grid, curvature.importance())
    nearest = codes_of(w, *steps.per_column(columns, grid.width(columns)), grid)
    codes = gptq(w, curvature, steps, grid)

    def total(steps, codes):
        return float(objective(w, _rounded(codes, steps, grid), curvature.hessian).sum())

    first = total(steps, codes)
    assert first <= total(steps, nearest)
    refit = refit_steps(w, curvature.hessian, steps, codes, grid)
    second = total(refit, codes)
    assert second <= first * (1 + 1e-4)
    third = total(refit, descend(w, curvature, refit, codes, grid))
    assert third <= second * (1 + 1e-4)
    assert total(*refine(w, curvature, steps, codes, grid, 2)) <= third * (1 + 1e-4)


def test_refitted_scales_are_the_least_squares_ones():
    """Against numpy's least squares on the inputs themselves, before fp16 rounds the scales."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(400, 64, generator=draw) @ torch.randn(64, 64, generator=draw) / 8
    w, grid = weight(4, 64, 5), Grid(4, 32)
    steps = search_steps(w, grid)
    codes = codes_of(w, *steps.per_column(64, 32), grid)
    found = refit_steps(w, x.t() @ x / 400, steps, codes, grid)
    for row in range(4):
        basis = torch.stack([x[:, :32] @ codes[row, :32], x[:, 32:] @ codes[row, 32:]], 1)
        expected = torch.linalg.lstsq(basis, (x @ w[row]).unsqueeze(1)).solution[:, 0]
        assert torch.allclose(found.scales[row], expected, rtol=2e-3)


def test_codes_after_a_sweep_cannot_be_bettered_one_by_one():
    """A fixed point of the sweep: no single code may move and lower the error."""
    w, grid = weight(2, 24, 11), Grid(3, 24)
    curvature = Curvature.of(hessian(24, 11), DAMP)
    steps = search_steps(w, grid)
    codes = gptq(w, curvature, steps, grid)
    for _ in range(30):
        codes = descend(w, curvature, steps, codes, grid)
    best = objective(w, _rounded(codes, steps, grid), curvature.hessian)
    for k in range(24):
        for move in (-1, 1):
            moved = codes.clone()
            moved[:, k] = (moved[:, k] + move).clamp(grid.low, grid.high)
            error = objective(w, _rounded(moved, steps, grid), curvature.hessian)
            assert bool((error >= best * (1 - 1e-5)).all())


def test_the_importance_is_what_an_error_costs_after_compensation():
    """The whole error of GPTQ is the sum over columns of error^2 / U[k, k]^2 when rounded."""
    w, h, grid = weight(1, 20, 2, torch.float64), hessian(20, 2, dtype=torch.float64), Grid(4, 20)
    curvature = Curvature.of(h, DAMP)
    steps = _double(search_steps(w.float(), grid))
    order, root = curvature.order, curvature.inverse_root
    rest, cost = w[0, order].clone(), 0.0
    for k in range(20):
        code = (rest[k] / steps.scales[0, 0]).round().clamp(grid.low, grid.high)
        error = (rest[k] - code * steps.scales[0, 0]) / root[k, k]
        cost += float(error**2)
        rest[k:] -= error * root[k, k:]
    codes = gptq(w, curvature, steps, grid)
    measured = objective(w, _rounded(codes, steps, grid), curvature.hessian)
    assert float(measured) == pytest.approx(cost, rel=1e-9)
    shares = curvature.importance()[order]
    expected = root.diagonal() ** -2
    assert torch.allclose(shares / shares[0], expected / expected[0])


def test_inputs_that_are_never_active_do_no_harm():
    w, h, grid = weight(4, 32, 3), hessian(32, 3), Grid(4, 32)
    h[5], h[:, 5], h[9], h[:, 9] = 0.0, 0.0, 0.0, 0.0
    curvature = Curvature.of(h, DAMP)
    codes = gptq(w, curvature, search_steps(w, grid), grid)
    assert bool(torch.isfinite(codes).all())
    assert bool((codes[:, [5, 9]] == 0).all())


def test_a_hessian_of_rank_one_is_damped_until_it_can_be_inverted():
    x = torch.randn(64, generator=torch.Generator().manual_seed(1))
    curvature = Curvature.of(torch.outer(x, x) * 1e6, 1e-9)
    assert bool(torch.isfinite(curvature.inverse_root).all())


def test_inputs_that_are_not_finite_are_refused():
    h = hessian(16, 1)
    h[3, 3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        Curvature.of(h)
