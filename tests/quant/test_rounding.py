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


@pytest.mark.parametrize("search", ["mse", "activation", "curvature"])
def test_the_scales_are_searched_by_the_named_weights(search):
    draw = torch.Generator().manual_seed(3)
    mixed = torch.randn(64, 64, generator=draw) * torch.logspace(-1, 1, 64)
    x = torch.randn(400, 64, generator=draw) @ mixed
    weight = torch.randn(16, 64, generator=draw)
    grid = Grid(3, 32)
    method = Method(search=search, rounds=0)
    found = round_linear(Dense(weight, None), grid, method, _moments(x))
    squares = x.square().mean(0)
    # What GPTQ leaves of an error in column k: the inverse of the k-th pivot, in its order.
    hessian = (x.t() @ x / len(x)).double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    order = torch.argsort(hessian.diagonal(), descending=True)
    inverse = torch.linalg.inv(hessian[order][:, order])
    upper = torch.linalg.cholesky(inverse, upper=True)
    left = torch.empty(64, dtype=torch.float64)
    left[order] = upper.diagonal().square().reciprocal()
    by = {"mse": None, "activation": squares, "curvature": left.float()}
    scales = {name: search_steps(weight, grid, weights).scales for name, weights in by.items()}
    assert torch.equal(found.packed.scales.float(), scales.pop(search))
    assert not any(torch.equal(found.packed.scales.float(), other) for other in scales.values())
