"""Some layers of a chunk at a time: what a range leaves for the next, and what a failure leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from configs.schema import FaultRule
from engine_actor.core.plan import LayerRange
from engine_actor.faults import FaultPlan
from engine_actor.work.isolate import Isolation
from engine_actor.work.pair import SerialPair
from engine_actor.work.prefill import OpenChunk, PrefillWork, RangeLost
from tests.doubles.scripted_runner import HashRunner
from tests.work.stage import Stage
from tests.work.test_works import PROMPT, run


def ranged(stage: Stage, opened: OpenChunk, first: int, last: int, of: int = 5) -> PrefillWork:
    """Layers first..last-1 of the prompt of request 1, as one step's work."""
    chunk = stage.chunk(1, 0, 6)
    chunk = replace(chunk, layers=LayerRange(first, last, of), samples=last == of)
    return replace(stage.prefill(chunk), open_chunk=opened)


def test_layer_ranges_give_what_one_launch_gives() -> None:
    """decisions.md section 3: a prefill can be launched in ranges and resumed."""
    stage, opened = Stage(HashRunner(n_layers=5)), OpenChunk()
    stage.request(1, PROMPT)
    for first, last in ((0, 2), (2, 3)):
        result = run(ranged(stage, opened, first, last))
        assert (result.computed, result.sampled) == (((("c", 1), 0),), ())
        assert opened.next_layer == last
    result = run(ranged(stage, opened, 3, 5))
    assert result.computed == ((("c", 1), 6),)
    (sample,) = result.sampled
    assert sample.token == stage.runner.expected(PROMPT, 1)[0]
    assert (opened.hidden, opened.inputs) == (None, None)
    assert stage.runner.live_bytes() == 0


@pytest.mark.parametrize(("first", "other"), [(1, False), (3, False), (2, True)])
def test_layer_ranges_follow_each_other(first: int, other: bool) -> None:
    """A gap, a layer again, or another sequence's half: nothing is computed on it."""
    stage, opened = Stage(HashRunner(n_layers=5)), OpenChunk()
    stage.request(1, PROMPT)
    run(ranged(stage, opened, 0, 2))
    opened.key = ("c", 2) if other else opened.key
    with pytest.raises(RangeLost, match="nothing is left of the layers before"):
        ranged(stage, opened, first, 5).prepare()


def test_a_range_that_fails_leaves_nothing_and_is_not_tried_again() -> None:
    plan = FaultPlan((FaultRule(stage="launch", times=1),))
    stage, opened = Stage(HashRunner(n_layers=5), hook=plan.hit), OpenChunk()
    stage.request(1, PROMPT)
    serial = SerialPair(torch.device("cpu"))
    isolation = Isolation(serial, serial)
    work = ranged(stage, opened, 0, 2)
    tally = isolation.finish(isolation.launch(None, work))
    assert (tally.results, tally.casualties, tally.put_off) == ([], [], {("c", 1)})
    assert stage.runner.live_bytes() == 0
    assert (opened.hidden, opened.next_layer) == (None, 0)
