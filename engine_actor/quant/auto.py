"""The `auto` recipe: measured once, kept beside the journal so that a resumed run asks no more.

Knows where the answer is kept; what it means is allocate.py's.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from engine_actor.load.checkpoint import Checkpoint
from engine_actor.load.progress import Progress
from engine_actor.load.refusal import read_json_object
from engine_actor.quant.allocate import TEXT_ROWS, Choice, choose, measure
from engine_actor.quant.evaluate import embed
from engine_actor.quant.forward import LayerForward
from engine_actor.quant.grid import Grid
from engine_actor.quant.journal import SUFFIX
from engine_actor.quant.layer_pass import LayerPass
from engine_actor.quant.plan import make_plan
from engine_actor.quant.recipe import Method, Recipe, with_exceptions
from engine_actor.quant.stream import LayerReader
from engine_actor.quant.texts import TokenRows

KEPT = "sensitivity.json"


def layer_budget(checkpoint: Checkpoint, like: Recipe, fit: int | None) -> int:
    """Bytes the layers may take: what `fit` leaves beside everything else of `like`; without one as
    much as `like` takes.
    """
    plan = make_plan(checkpoint.config, like)
    return plan.layers if fit is None else fit - (plan.total - plan.layers)


def auto_recipe(choices: dict[str, list[Choice]], budget: int, like: Recipe) -> Recipe:
    """`like` with the grids that `choices` make under `budget` bytes. Raises PlanError where there
    are none.
    """
    return with_exceptions(like, "auto", choose(choices, budget))


@torch.inference_mode()
def sensitivities(
    checkpoint: Checkpoint,
    calibration: TokenRows,
    target: Path,
    device: torch.device,
    progress: Progress,
) -> dict[str, list[Choice]]:
    """Choices of every linear, measured, or as an unfinished run at `target` has measured them."""
    key = f"{checkpoint.fingerprint} {calibration.digest}"
    path = target.with_name(target.name + SUFFIX) / KEPT
    if path.is_file():
        kept = read_json_object(path)
        if kept.get("key") == key:
            return {name: [_choice(c) for c in found] for name, found in kept["choices"].items()}
    config = checkpoint.config
    reader = LayerReader(checkpoint, device)
    forward = LayerForward(config, calibration.tokens.shape[1], device)
    hidden = embed(reader.top("embed"), calibration.tokens[:TEXT_ROWS])
    layers = LayerPass(forward, Method(), device)
    choices = measure(reader, layers, config.n_layers, hidden, progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    written = {name: [asdict(choice) for choice in found] for name, found in choices.items()}
    partial.write_text(json.dumps({"key": key, "choices": written}), encoding="utf-8")
    partial.replace(path)
    return choices


def _choice(kept: dict[str, object]) -> Choice:
    grid, nbytes, harm = kept["grid"], kept["nbytes"], kept["harm"]
    assert isinstance(grid, dict)
    assert isinstance(nbytes, int)
    assert isinstance(harm, float)
    return Choice(Grid(**grid), nbytes, harm)
