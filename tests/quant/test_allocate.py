"""`auto`: the knapsack against every combination there is, and what it buys on a tiny model."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.load.progress import silent
from engine_actor.quant.allocate import CHOICES, Choice, choose
from engine_actor.quant.auto import auto_recipe, layer_budget, sensitivities
from engine_actor.quant.grid import Grid
from engine_actor.quant.journal import SUFFIX
from engine_actor.quant.plan import PlanError, make_plan
from engine_actor.quant.recipe import fixed_recipe

NAMES = ("a", "b", "c")
GRIDS = (Grid(3, 128), Grid(3, 64), Grid(4, 128))
LIKE = fixed_recipe("mixed")
option = st.tuples(st.integers(1, 40), st.floats(0.01, 10.0))


def _spent(choices, chosen):
    found = {
        name: next(c for c in choices[name] if c.grid == grid) for name, grid in chosen.items()
    }
    return sum(c.nbytes for c in found.values()), sum(c.harm for c in found.values())


@given(
    options=st.lists(st.lists(option, min_size=3, max_size=3), min_size=3, max_size=3),
    slack=st.floats(0, 1),
)
def test_it_stays_in_budget_and_nothing_beats_it_by_more_than_one_step(options, slack):
    choices = {
        name: [Choice(grid, *pair) for grid, pair in zip(GRIDS, pairs, strict=True)]
        for name, pairs in zip(NAMES, options, strict=True)
    }
    least = sum(min(c.nbytes for c in found) for found in choices.values())
    most = sum(max(c.nbytes for c in found) for found in choices.values())
    budget = least + int(slack * (most - least))
    spent, harm = _spent(choices, choose(choices, budget))
    assert spent <= budget
    best = min(
        sum(c.harm for c in picks)
        for picks in itertools.product(*choices.values())
        if sum(c.nbytes for c in picks) <= budget
    )
    # The greedy hull is optimal at every budget that it spends in full; else one step short of it.
    largest = max(max(c.harm for c in f) - min(c.harm for c in f) for f in choices.values())
    assert best - 1e-9 <= harm <= best + largest + 1e-9


def test_with_room_for_everything_it_takes_the_least_harm():
    choices = {"a": [Choice(GRIDS[0], 1, 5.0), Choice(GRIDS[1], 2, 1.0), Choice(GRIDS[2], 3, 2.0)]}
    assert choose(choices, 100) == {"a": GRIDS[1]}


def test_bytes_go_where_the_model_minds_most():
    choices = {
        "minds": [Choice(GRIDS[0], 10, 9.0), Choice(GRIDS[2], 14, 1.0)],
        "does not": [Choice(GRIDS[0], 10, 0.9), Choice(GRIDS[2], 14, 0.1)],
    }
    assert choose(choices, 24) == {"minds": GRIDS[2], "does not": GRIDS[0]}


def test_too_small_a_budget_is_refused():
    with pytest.raises(PlanError, match="the layers need at least 5 bytes, the budget leaves 4"):
        choose({"a": [Choice(GRIDS[0], 5, 1.0)]}, 4)


def test_a_measured_model_gets_a_recipe_within_its_bytes(make_job, tmp_path):
    job = make_job("llama", hidden_size=128, intermediate_size=256)
    found = sensitivities(job.source, job.calibration, tmp_path / "out", job.device, silent)
    assert set(found) == {
        f"layers.{i}.{s}" for i in (0, 1) for s in ("qkv", "o", "gate_up", "down")
    }
    for options in found.values():
        harm = {choice.grid: choice.harm for choice in options}
        assert set(harm) == set(CHOICES)
        assert harm[Grid(4, 32)] < harm[Grid(4, 128)] < harm[Grid(3, 32)] < harm[Grid(3, 128)]
    budget = layer_budget(job.source, LIKE, None)
    recipe = auto_recipe(found, budget, LIKE)
    assert make_plan(job.source.config, recipe).layers <= budget
    assert len(set(recipe.exceptions.values())) > 1


def test_harm_is_the_change_of_the_stream_behind_the_layer(make_job, tmp_path):
    """By hand for one linear: the layer is run whole, and with that linear rounded."""
    from engine_actor.quant.allocate import COARSE, TEXT_ROWS, _nearest
    from engine_actor.quant.evaluate import embed
    from engine_actor.quant.forward import LayerForward
    from engine_actor.quant.layer_pass import LayerPass
    from engine_actor.quant.recipe import Method
    from engine_actor.quant.stream import Dense, LayerReader, LayerWeights

    job = make_job("qwen2")
    found = sensitivities(job.source, job.calibration, tmp_path / "out", job.device, silent)
    reader = LayerReader(job.source, job.device)
    layers = LayerPass(LayerForward(job.source.config, 64, job.device), Method(), job.device)
    start = embed(reader.top("embed"), job.calibration.tokens[:TEXT_ROWS])
    weights = reader.layer(0)
    squares = layers.input_squares(start, weights)["down"]
    down = weights.linears["down"]
    rounded = Dense(_nearest(down.weight, COARSE, squares), down.bias)
    plain, changed = start.clone(), start.clone()
    layers.advance(plain, weights)
    layers.advance(changed, LayerWeights({**weights.linears, "down": rounded}, weights.norms))
    miss = (changed - plain)[:, 1:].norm(dim=-1) / plain[:, 1:].norm(dim=-1)
    coarse = next(c for c in found["layers.0.down"] if c.grid == COARSE)
    assert coarse.harm == pytest.approx(float((miss**2).mean()), rel=1e-4)


def test_what_was_measured_is_kept_for_a_resumed_run(make_job, tmp_path):
    job = make_job("llama")
    first = sensitivities(job.source, job.calibration, tmp_path / "out", job.device, silent)
    assert (tmp_path / f"out{SUFFIX}").is_dir()

    def never(stage, done, total):
        raise AssertionError("measured again")

    kept = sensitivities(job.source, job.calibration, tmp_path / "out", job.device, never)
    assert kept == first
    other = type(job.calibration)("other", torch.roll(job.calibration.tokens, 1))
    with pytest.raises(AssertionError, match="measured again"):
        sensitivities(job.source, other, tmp_path / "out", job.device, never)
