"""One forward pass for both works: what it computes, and how it comes apart when it fails."""

from __future__ import annotations

import pytest
import torch

from configs.schema import FaultRule
from engine_actor.faults import FaultPlan
from engine_actor.work.base import Work
from engine_actor.work.isolate import Isolation, Tally
from engine_actor.work.mixed import MixedWork
from engine_actor.work.pair import SerialPair
from tests.work.stage import Stage

CPU = torch.device("cpu")
PROMPT = tuple(range(11, 23))
N = 6


def staged(*rules: FaultRule, logprobs: int | None = None) -> tuple[Stage, FaultPlan]:
    """Six requests of 13 tokens; those with an odd id are computed and decode."""
    plan = FaultPlan(rules)
    stage = Stage(hook=plan.hit)
    quiet = Stage(stage.runner)
    for rid in range(N):
        stage.request(rid, (*PROMPT, rid), prompt_logprobs=logprobs)
    for rid in range(1, N, 2):
        request = quiet.request(rid, (*PROMPT, rid))
        work = quiet.prefill(quiet.chunk(rid, 0, 13))
        (token,) = alone(work).results[0].sampled
        request.tokens.append(token.token)
        stage.requests[request.key] = request
    return stage, plan


def alone(work: Work) -> Tally:
    serial = SerialPair(CPU)
    isolation = Isolation(serial, serial, lambda: None)
    return isolation.finish(isolation.launch(work, None))


def mixed(stage: Stage) -> MixedWork:
    decode = stage.decode(*(stage.slot(rid) for rid in range(1, N, 2)))
    prefill = stage.prefill(*(stage.chunk(rid, 0, 13) for rid in range(0, N, 2)))
    return MixedWork(17, stage.context, decode=decode, prefill=prefill)


def sampled(tally: Tally) -> dict[int, int]:
    return {token.key[1]: token.token for result in tally.results for token in result.sampled}


def right_tokens(stage: Stage) -> dict[int, int]:
    return {
        rid: stage.runner.expected((*PROMPT, rid), 1 + rid % 2)[-1] for rid in range(N)
    }  # the odd ones have one token already


def test_one_forward_gives_both_works_results() -> None:
    stage, _ = staged()
    launches = stage.runner.launches
    tally = alone(mixed(stage))
    assert stage.runner.launches == launches + 1
    (result,) = tally.results
    assert sampled(tally) == right_tokens(stage)
    assert [key[1] for key, _ in result.computed] == [1, 3, 5, 0, 2, 4]
    assert {end for _, end in result.computed} == {13, 14}
    assert set(tally.seconds) == {"mixed"}


def test_a_chunk_that_does_not_sample_has_no_row() -> None:
    stage, _ = staged()
    decode = stage.decode(stage.slot(1))
    prefill = stage.prefill(stage.chunk(0, 0, 8))
    work = MixedWork(17, stage.context, decode=decode, prefill=prefill)
    assert (work.rows, work.keys) == (9, (("c", 1), ("c", 0)))
    tally = alone(work)
    assert sampled(tally) == {1: right_tokens(stage)[1]}
    assert dict(tally.results[0].computed) == {("c", 1): 14, ("c", 0): 8}


def test_prompt_logprobs_read_the_prompts_rows() -> None:
    stage, _ = staged(logprobs=1)
    apart = stage.prefill(*(stage.chunk(rid, 0, 13) for rid in range(0, N, 2)))
    expected = alone(apart).results[0].prompt_logprobs
    assert len(expected) == 3
    assert alone(mixed(stage)).results[0].prompt_logprobs == expected


@pytest.mark.parametrize("stage_name", ["prepare", "launch", "finish"])
def test_what_fails_together_passes_apart(stage_name: str) -> None:
    rule = FaultRule(stage=stage_name, times=1)  # type: ignore[arg-type]
    stage, plan = staged(rule)
    launches = stage.runner.launches
    tally = alone(mixed(stage))
    assert tally.casualties == []
    assert sampled(tally) == right_tokens(stage)
    assert plan.fired == 1
    assert set(tally.seconds) == {"decode", "prefill"}
    assert stage.runner.launches - launches <= 3


@pytest.mark.parametrize("stage_name", ["prepare", "launch", "finish"])
@pytest.mark.parametrize("guilty", range(N))
def test_a_fault_of_one_request_is_found_alone(stage_name: str, guilty: int) -> None:
    """B-22, S-42."""
    rule = FaultRule(stage=stage_name, request=f"r{guilty}", times="always")  # type: ignore
    stage, _ = staged(rule)
    tally = alone(mixed(stage))
    assert [casualty.key for casualty in tally.casualties] == [("c", guilty)]
    expected = right_tokens(stage)
    del expected[guilty]
    assert sampled(tally) == expected


@pytest.mark.parametrize("rows", range(2, 42, 3))
def test_above_n_rows_everything_passes_in_smaller_works(rows: int) -> None:
    stage, _ = staged(FaultRule(stage="launch", min_rows=rows, times="always"))
    tally = alone(mixed(stage))
    assert tally.casualties == []
    assert sampled(tally) == right_tokens(stage)


def test_without_some_or_all_of_its_sequences() -> None:
    stage, _ = staged()
    work = mixed(stage)
    odd, even = ({("c", rid) for rid in range(first, N, 2)} for first in (1, 0))
    assert work.without(set()) is work
    left = work.without({("c", 1), ("c", 4)})
    assert left is not None
    assert left.keys == (("c", 3), ("c", 5), ("c", 0), ("c", 2))
    for gone, kind in ((odd, "prefill"), (even, "decode")):
        left = work.without(gone)
        assert left is not None
        assert left.kind == kind
    assert work.without(odd | even) is None


def test_nothing_is_held_after_it_has_ended() -> None:
    stage, _ = staged(logprobs=1)
    work = mixed(stage)
    alone(work)
    assert stage.runner.live_bytes() == 0
