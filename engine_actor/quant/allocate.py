"""`auto`: which grid each linear gets, from how much the model minds and what the bytes allow.

Every linear is rounded alone on a coarse grid, and the relative change of the residual stream
behind its layer is measured on a piece of the calibration text: one currency for all of them.
Other grids scale by their error on a sample of rows. A knapsack then buys the best error per byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine_actor.load.progress import Progress
from engine_actor.quant.grid import Grid, codes_of, values_of
from engine_actor.quant.layer_pass import LayerPass
from engine_actor.quant.plan import PlanError
from engine_actor.quant.scale_search import search_steps
from engine_actor.quant.stream import LINEARS, Dense, LayerReader, LayerWeights

COARSE = Grid(3, 128)
CHOICES = (Grid(3, 128), Grid(3, 64), Grid(3, 32), Grid(4, 128), Grid(4, 64), Grid(4, 32))
"""Grids that `auto` chooses from. K below a group makes a short group, never an error."""
SAMPLE_ROWS = 256
"""Rows of a linear on which the grids are compared."""
TEXT_ROWS = 4
"""Rows of the calibration text that the change is measured on."""
FIRST_TOKEN = 1
"""The first token's hidden state is huge and of no consequence; it is left out."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One grid for one linear: bytes it takes, harm it does (relative change of the stream)."""

    grid: Grid
    nbytes: int
    harm: float


def measure(
    reader: LayerReader, layers: LayerPass, n_layers: int, hidden: torch.Tensor, progress: Progress
) -> dict[str, list[Choice]]:
    """Choices of every linear by full name. hidden [S, T, hidden] is moved through the source."""
    found: dict[str, list[Choice]] = {}
    for index in range(n_layers):
        progress("sensitivity", index, n_layers)
        weights = reader.layer(index)
        before = hidden.clone()
        layers.advance(hidden, weights)
        moments = layers.input_squares(before, weights)
        for short in LINEARS:
            dense = weights.linears[short]
            coarse = Dense(_nearest(dense.weight, COARSE, moments[short]), dense.bias)
            changed = before.clone()
            layers.advance(changed, LayerWeights({**weights.linears, short: coarse}, weights.norms))
            harm = _relative(changed, hidden)
            found[f"layers.{index}.{short}"] = _choices(dense.weight, harm, moments[short])
    progress("sensitivity", n_layers, n_layers)
    return found


def _relative(changed: torch.Tensor, hidden: torch.Tensor) -> float:
    """Mean over tokens of |change|^2 / |stream|^2."""
    miss = (changed - hidden)[:, FIRST_TOKEN:].square().sum(-1)
    return float((miss / hidden[:, FIRST_TOKEN:].square().sum(-1).clamp_min(1e-12)).mean())


def _nearest(weight: torch.Tensor, grid: Grid, squares: torch.Tensor) -> torch.Tensor:
    columns = weight.shape[1]
    steps = search_steps(weight, grid, squares)
    scale, offset = steps.per_column(columns, grid.width(columns))
    return values_of(codes_of(weight, scale, offset, grid), scale, offset)


def _choices(weight: torch.Tensor, harm: float, squares: torch.Tensor) -> list[Choice]:
    stride = max(1, weight.shape[0] // SAMPLE_ROWS)
    sample = weight[::stride]

    def error(grid: Grid) -> float:
        return float(((_nearest(sample, grid, squares) - sample).square() * squares).sum())

    unit = harm / max(error(COARSE), 1e-30)
    return [Choice(grid, grid.nbytes(*weight.shape), unit * error(grid)) for grid in CHOICES]


def choose(choices: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, Grid]:
    """The grids of least summed harm within `budget` bytes, up to one step of one linear.

    Greedy over the lower convex hull of each linear's (bytes, harm), the best harm per byte first.
    Raises PlanError where even the smallest grids are over the budget.
    """
    hulls = {name: _hull(options) for name, options in choices.items()}
    at = dict.fromkeys(hulls, 0)
    spent = sum(hull[0].nbytes for hull in hulls.values())
    if spent > budget:
        raise PlanError(f"auto: the layers need at least {spent} bytes, the budget leaves {budget}")
    steps = [
        (_gain(hull[i], hull[i + 1]), name, i)
        for name, hull in hulls.items()
        for i in range(len(hull) - 1)
    ]
    for _, name, i in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        extra = hulls[name][i + 1].nbytes - hulls[name][i].nbytes
        if at[name] == i and spent + extra <= budget:
            at[name], spent = i + 1, spent + extra
    return {name: hull[at[name]].grid for name, hull in hulls.items()}


def _gain(now: Choice, then: Choice) -> float:
    return (now.harm - then.harm) / (then.nbytes - now.nbytes)


def _hull(options: Sequence[Choice]) -> list[Choice]:
    """Choices worth taking: more bytes, less harm, and ever less gain per byte."""
    hull: list[Choice] = []
    for option in sorted(options, key=lambda choice: (choice.nbytes, choice.harm)):
        if hull and option.harm >= hull[-1].harm:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull
