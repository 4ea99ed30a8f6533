"""Pipeline depth 1: the next step is planned before the last one is committed; the same texts."""

from __future__ import annotations

import pytest

from engine_actor.core.params import SamplingParams
from engine_actor.core.sequence import FinishReason
from tests.doubles.paged_model import Fault, solo_run
from tests.doubles.scheduler_harness import SchedulerHarness


def texts(depth: int, n_blocks: int, partial_prefills: int) -> dict[int, tuple[list[int], str]]:
    """The output and the end of each of twelve requests, some stopped by a token."""
    engine = SchedulerHarness(
        n_blocks=n_blocks,
        depth=depth,
        chunk=24,
        max_partial_prefills=partial_prefills,
        max_num_seqs=6,
    )
    for rid in range(12):
        prompt = [rid % 3, *range(10 + 3 * rid)]
        engine.add(rid, prompt, sampling=SamplingParams(max_tokens=5 + 4 * rid))
        engine.step()
    engine.run()
    return {
        request.key[1]: (request.tokens[request.n_prompt :], str(request.finish))
        for request in engine.requests.values()
    }


@pytest.mark.parametrize("n_blocks", [7, 64])
@pytest.mark.parametrize("partial_prefills", [1, 4])
def test_depth_0_and_1_give_the_same_token_streams(n_blocks: int, partial_prefills: int) -> None:
    serial = texts(0, n_blocks, partial_prefills)
    assert texts(1, n_blocks, partial_prefills) == serial
    assert {reason for _, reason in serial.values()} == {"FinishReason.STOP", "FinishReason.LENGTH"}


def test_a_slot_planned_ahead_names_the_place_of_its_token() -> None:
    engine = SchedulerHarness(depth=1, chunk=8)
    request = engine.add(1, range(12), max_tokens=4)
    first, last = engine.plan(), engine.plan()
    assert [(chunk.start, chunk.end) for chunk in (*first.prefill, *last.prefill)] == [
        (0, 8),
        (8, 12),
    ]
    engine.join()
    ahead = engine.plan()
    assert [(slot.position, slot.token) for slot in ahead.decode] == [(12, None)]
    assert ahead.decode[0].slot == last.prefill[0].slot
    engine.join()
    assert request.n_output == 1
    assert [slot.token for slot in engine.plan().decode] == [None]
    engine.join()
    engine.run()


def test_the_token_sampled_after_a_stop_is_never_accepted() -> None:
    """The step after the stop is in flight already when the stop is seen: one step late."""
    prompt = [3, 1, 4, 1, 5]
    sampling = SamplingParams(max_tokens=200)
    output, reason = solo_run(prompt, sampling)
    assert reason is FinishReason.STOP
    engine = SchedulerHarness(depth=1)
    request = engine.add(1, prompt, sampling=sampling)
    while request.finish is None:
        engine.step()
    assert (request.in_flight, request.blocks != []) == (1, True)
    late = engine.join()
    assert late == ()
    assert (request.tokens[5:], request.blocks) == (output, [])
    engine.check_all_ended()


def test_no_step_is_planned_beyond_max_tokens() -> None:
    engine = SchedulerHarness(depth=1)
    engine.add(1, range(10), max_tokens=3)
    positions = [slot.position for _ in range(8) for slot in engine.step().decode]
    assert positions == [10, 11]
    engine.check_all_ended()


@pytest.mark.parametrize("kind", ["retry", "silent", "partial", "mute"])
def test_what_builds_on_a_step_that_did_not_deliver_is_void(kind: str) -> None:
    """The step in flight behind a retried one has read a token that never was."""
    faults: list[Fault | None] = [None, None, Fault(kind)]
    engine = SchedulerHarness(
        depth=1, chunk=16, fault=lambda key, n: faults.pop(0) if faults else None
    )
    request = engine.add(1, range(40), max_tokens=6)
    engine.run()
    assert not faults
    assert request.finish is FinishReason.LENGTH


def test_a_failure_with_the_next_step_in_flight_keeps_the_blocks_until_it_is_joined() -> None:
    faults: list[Fault | None] = [None, Fault("fail")]
    engine = SchedulerHarness(depth=1, fault=lambda key, n: faults.pop(0) if faults else None)
    request = engine.add(1, range(10), max_tokens=6)
    engine.plan()
    engine.plan()
    engine.join()
    engine.plan()
    (end,) = engine.join()
    assert (end.reason, end.code) == (FinishReason.OOM, "out_of_memory")
    assert request.blocks
    assert engine.join() == ()
    engine.check_all_ended()
