"""Recipes: which grid each linear gets, and by which method its codes are found.

`w4`, `w3` and `mixed` are fixed; `auto` chooses between grids under a byte budget (allocate.py).
Pure values: a recipe is written into the checkpoint it made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from engine_actor.quant.grid import Grid
from engine_actor.quant.stream import LINEARS

GROUP = 64
"""Default group: 0.25 bits a weight for scales."""
EMBEDDING = Grid(8, -1)
"""Embedding and head: 8 bits a row. Four bits there cost more KL than all layers at four."""
NAMES = ("w4", "w3", "mixed", "auto")


@dataclass(frozen=True, slots=True)
class Method:
    """How codes and steps are found.

    rounding: nearest, or gptq with its curvature. search: candidates weighed alike (mse), by the
    inputs' mean square (activation) or by what GPTQ leaves (curvature); none is the absmax rule.
    By curvature nearly every linear has less error on the text it is calibrated on, and the model
    more on other text: KL grows by 37 % at 4 bits on SmolLM2, at 3 on a 1.5B (docs/results).
    damp: see gptq.Curvature. rounds: refits and sweeps after GPTQ.
    """

    rounding: Literal["nearest", "gptq"] = "gptq"
    search: Literal["none", "mse", "activation", "curvature"] = "activation"
    damp: float = 0.01
    rounds: int = 1

    @property
    def needs_inputs(self) -> bool:
        """Whether calibration text has to be run through the layers."""
        return self.rounding == "gptq" or self.search not in ("none", "mse")


@dataclass(frozen=True, slots=True)
class Recipe:
    """grids: by short name of the linear; exceptions: by full name (`layers.3.down`). embedding: of
    the embedding, which a tied head reads too; head: of a head of its own.
    """

    name: str
    grids: Mapping[str, Grid]
    method: Method = field(default_factory=Method)
    embedding: Grid = EMBEDDING
    exceptions: Mapping[str, Grid] = field(default_factory=dict)
    head: Grid = EMBEDDING

    def table(self, name: str) -> Grid:
        """The grid of `embed` or `head`."""
        return self.head if name == "head" else self.embedding

    def grid(self, layer: int, short: str) -> Grid:
        """The grid of one linear."""
        return self.exceptions.get(f"layers.{layer}.{short}", self.grids[short])

    def described(self) -> dict[str, Any]:
        """For config.json and for telling two runs apart."""
        return {
            "name": self.name,
            "grids": {short: asdict(grid) for short, grid in self.grids.items()},
            "embedding": asdict(self.embedding),
            "head": asdict(self.head),
            "method": asdict(self.method),
            "exceptions": {name: asdict(grid) for name, grid in self.exceptions.items()},
        }


def fixed_recipe(
    name: str, group: int = GROUP, offsets: bool = False, method: Method | None = None
) -> Recipe:
    """w4: all linears at 4 bits; w3: at 3; mixed: attention at 4, MLP at 3. ValueError else."""
    attention, mlp = {"w4": (4, 4), "w3": (3, 3), "mixed": (4, 3)}.get(name, (0, 0))
    if not attention:
        raise ValueError(f"recipe {name!r} is none of {', '.join(NAMES[:3])}")
    bits = dict(zip(LINEARS, (attention, attention, mlp, mlp), strict=True))
    grids = {short: Grid(bits[short], group, offsets) for short in LINEARS}
    return Recipe(name, grids, method or Method())


def with_exceptions(recipe: Recipe, name: str, exceptions: Mapping[str, Grid]) -> Recipe:
    """The recipe under another name with grids of its own for some linears."""
    return replace(recipe, name=name, exceptions=dict(exceptions))
