"""The last layer computes only rows whose logits are wanted: the same logits, the same cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.forward import ModelRunner
from tests.model.tiny_models import FAMILIES, Part, batch, oracle, runner_for

IDS = [5, 77, 3, 12, 60, 1, 1, 44, 9, 8, 7]


def inputs_of(wanted: tuple[int, ...]) -> BatchInputs:
    """A chunk behind cached tokens, a decoded row, a whole prompt; logits of some of them."""
    inputs = batch(
        [
            Part(IDS[:5], 4, [7, 2, 5]),
            Part(IDS[5:6], 9, [1, 9, 11]),
            Part(IDS, 0, [3, 8, 4]),
        ]
    )
    return replace(inputs, wanted=wanted, logit_rows=inputs.logit_rows[list(wanted)])


def before(runner: ModelRunner) -> None:
    """What the first two sequences have in the cache."""
    inputs = batch([Part(IDS[:4], 0, [7]), Part(IDS[:9], 0, [1, 9, 11])])
    runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)


@pytest.mark.parametrize("wanted", [(), (0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_cache_are_those_of_all_rows(
    family: str, numerics: str, wanted: tuple[int, ...]
) -> None:
    runner = runner_for(oracle(family), numerics)
    inputs = inputs_of(wanted)
    before(runner)
    hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
    want = runner.logits(hidden, inputs.logit_rows)
    cache = runner.kv_checksum(tuple(range(12)))
    for first in (0, 2):
        runner.resize_kv(1)
        runner.resize_kv(64)
        before(runner)
        begun = runner.embed(inputs)
        if first:
            begun = runner.run_layers(begun, inputs, 0, first)
        kept = begun.clone()
        got = runner.last_logits(begun, inputs, first)
        assert torch.equal(begun, kept), "a failed call could not be repeated"
        assert runner.kv_checksum(tuple(range(12))) == cache
        if not wanted:
            assert got is None
            continue
        assert got is not None
        if numerics == "exact":
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_rows_that_end_no_sequence_are_computed_with_all_others() -> None:
    runner = runner_for(oracle("llama"), "exact")
    inputs = replace(inputs_of(()), wanted=None, logit_rows=torch.tensor([2, 8]))
    before(runner)
    got = runner.last_logits(runner.embed(inputs), inputs, 0)
    hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
    assert got is not None
    assert torch.equal(got, runner.logits(hidden, inputs.logit_rows))
