"""One linear by a method: which weights the search for scales goes by."""

from __future__ import annotations

import pytest
import torch

from engine_actor.quant.calibrate import InputMoments
from engine_actor.quant.grid import Grid
from engine_actor.quant.recipe import Method
from engine_actor.quant.rounding import round_linear
from engine_actor.quant.scale_search import search_steps
from engine_actor.quant.stream import Dense

CPU = torch.device("cpu")


def _moments(x: torch.Tensor) -> InputMoments:
    moments = InputMoments(x.shape[1], CPU)
    moments.add(x)
    return moments


@pytest.mark.parametrize(("bits", "search"), [(3, "balanced"), (4, "activation")])
def test_the_scales_are_searched_by_what_was_measured_to_be_best_at_these_bits(bits, search):
    draw = torch.Generator().manual_seed(bits)
    mixed = torch.randn(64, 64, generator=draw) * torch.logspace(-1, 1, 64)
    x = torch.randn(400, 64, generator=draw) @ mixed
    weight = torch.randn(16, 64, generator=draw)
    grid = Grid(bits, 32)
    found = round_linear(Dense(weight, None), grid, Method(rounds=0), _moments(x))
    squares = x.square().mean(0)
    # What GPTQ leaves of an error in column k: the inverse of the k-th pivot, in its order.
    hessian = (x.t() @ x / len(x)).double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    order = torch.argsort(hessian.diagonal(), descending=True)
    inverse = torch.linalg.inv(hessian[order][:, order])
    upper = torch.linalg.cholesky(inverse, upper=True)
    left = torch.empty(64, dtype=torch.float64)
    left[order] = upper.diagonal().square().reciprocal()
    by = {"activation": squares, "balanced": (squares * left).sqrt().float()}
    wanted = search_steps(weight, grid, by[search]).scales
    other = search_steps(weight, grid, squares if search == "balanced" else None).scales
    assert torch.equal(found.packed.scales.float(), wanted)
    assert not torch.equal(wanted, other)
