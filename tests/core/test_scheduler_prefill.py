"""Chunked prefill: one token budget, several prompts a step, turns, priorities, prompt logprobs."""

from __future__ import annotations

import pytest

from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import StepPlan
from engine_actor.core.sequence import SeqState
from tests.doubles.scheduler_harness import SchedulerHarness


def chunks(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(rid, start, end) of each chunk."""
    return [(chunk.key[1], chunk.start, chunk.end) for chunk in plan.prefill]


def prompt(rid: int, n_tokens: int) -> list[int]:
    """A prompt that shares its first block with no other rid."""
    return [100 + rid, *range(n_tokens - 1)]


def test_a_prompt_is_computed_in_chunks_and_samples_only_at_its_end() -> None:
    engine = SchedulerHarness(chunk=16)
    request = engine.add(1, prompt(1, 40), max_tokens=2)
    plans = [engine.step() for _ in range(4)]
    assert [chunks(plan) for plan in plans] == [[(1, 0, 16)], [(1, 16, 32)], [(1, 32, 40)], []]
    assert [plan.prefill[0].samples for plan in plans[:3]] == [False, False, True]
    assert [len(plan.prefill[0].blocks) for plan in plans[:3]] == [1, 2, 3]
    assert [(slot.position, slot.token) for slot in plans[3].decode] == [(40, request.tokens[40])]
    engine.check_all_ended()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_digests_of_a_launched_chunk_are_made_ahead(prefix_cache: bool) -> None:
    """Those of its full blocks, before anybody knows whether it passed."""
    engine = SchedulerHarness(chunk=40, prefix_cache=prefix_cache)
    request = engine.add(1, prompt(1, 100), max_tokens=2)
    for full in (2, 5, 6):
        plan = engine.plan()
        engine.scheduler.look_ahead(plan)
        assert len(request.block_hashes) == (full if prefix_cache else 0)
        engine.join()
    engine.cancel(1)
    engine.scheduler.look_ahead(plan)
    engine.run()


def test_one_partial_prefill_takes_prompts_in_turns() -> None:
    """S-46: one chunk a step, round-robin, a short prompt is not behind all of a long one."""
    engine = SchedulerHarness(chunk=16, max_partial_prefills=1)
    engine.add(1, prompt(1, 64))
    engine.add(2, prompt(2, 32))
    served = [chunks(engine.step())[0][0] for _ in range(6)]
    assert served == [1, 2, 1, 2, 1, 1]
    engine.run()


def test_four_partial_prefills_share_the_budget_evenly_and_use_all_of_it() -> None:
    engine = SchedulerHarness(chunk=64, max_partial_prefills=4)
    for rid in range(1, 6):
        engine.add(rid, prompt(rid, 100))
    plan = engine.step()
    assert chunks(plan) == [(1, 0, 16), (2, 0, 16), (3, 0, 16), (4, 0, 16)]
    assert chunks(engine.step())[0] == (5, 0, 16)
    engine.run()


def test_what_a_short_prompt_leaves_goes_to_the_others() -> None:
    engine = SchedulerHarness(chunk=64)
    engine.add(1, prompt(1, 4))
    engine.add(2, prompt(2, 100))
    assert chunks(engine.step()) == [(1, 0, 4), (2, 0, 60)]
    engine.run()


def test_a_budget_smaller_than_the_number_of_prompts_starves_nobody() -> None:
    engine = SchedulerHarness(chunk=2, max_partial_prefills=4)
    for rid in range(4):
        engine.add(rid, prompt(rid, 6))
    served = [{chunk[0] for chunk in chunks(engine.step())} for _ in range(4)]
    assert served == [{0, 1}, {2, 3}, {0, 1}, {2, 3}]
    engine.run()


def test_the_chunk_shrinks_while_a_stream_decodes() -> None:
    """S-107."""
    engine = SchedulerHarness(chunk=64, chunk_while_decoding=8)
    engine.add(1, prompt(1, 10), max_tokens=30)
    assert chunks(engine.step()) == [(1, 0, 10)]
    engine.add(2, prompt(2, 20))
    plan = engine.step()
    assert chunks(plan) == [(2, 0, 8)]
    assert len(plan.decode) == 1
    engine.run()


def test_smaller_priority_takes_its_tokens_before_the_other() -> None:
    engine = SchedulerHarness(chunk=32)
    engine.add(1, prompt(1, 64), priority=1)
    engine.add(2, prompt(2, 40), priority=0)
    assert chunks(engine.step()) == [(2, 0, 32)]
    assert chunks(engine.step()) == [(2, 32, 40), (1, 0, 24)]
    engine.run()


def seconds_until_low_ends(partial_prefills: int, ageing_s: float) -> float | None:
    """A steady run of high requests with one low among them; None where it has to wait over 4 s."""
    engine = SchedulerHarness(
        n_blocks=12,
        chunk=16,
        max_num_seqs=3,
        max_partial_prefills=partial_prefills,
        ageing_s=ageing_s,
    )
    rid = 0
    while engine.clock.now() < 4.0 and ("c", 0) not in engine.ended:
        while len(engine.scheduler.waiting) < 4:
            rid += 1
            engine.add(rid, prompt(rid, 30), max_tokens=8)
        if ("c", 0) not in engine.requests:
            engine.add(0, prompt(0, 48), max_tokens=20, priority=2)
        engine.step()
    seconds = engine.clock.now() if ("c", 0) in engine.ended else None
    engine.run()
    return seconds


@pytest.mark.parametrize("partial_prefills", [1, 4])
def test_a_low_priority_ends_within_its_ageing_time_under_a_steady_run_of_high(
    partial_prefills: int,
) -> None:
    """B-33: two levels of half a second, then its own turn; without ageing it would never start."""
    seconds = seconds_until_low_ends(partial_prefills, ageing_s=0.5)
    assert seconds is not None
    assert 1.0 < seconds < 2.5
    assert seconds_until_low_ends(partial_prefills, ageing_s=1000.0) is None


def test_a_request_of_no_tokens_ends_after_its_prefill_without_a_sample() -> None:
    """Echo with logprobs: every prompt row is wanted, no token is made."""
    engine = SchedulerHarness(chunk=16)
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=2)
    request = engine.add(1, prompt(1, 20), sampling=sampling)
    plans = [engine.step(), engine.step()]
    assert [plan.prefill[0].prompt_logprobs for plan in plans] == [2, 2]
    assert not any(plan.prefill[0].samples for plan in plans)
    engine.check_all_ended()
    assert (request.n_output, request.state) == (0, SeqState.DONE)


def test_a_cached_prompt_of_no_tokens_to_make_ends_too() -> None:
    engine = SchedulerHarness()
    engine.add(1, prompt(1, 32), max_tokens=1)
    engine.run()
    engine.add(2, prompt(1, 32), sampling=SamplingParams(max_tokens=0))
    assert chunks(engine.step()) == [(2, 16, 32)]
    engine.check_all_ended()


def test_prompt_logprobs_are_asked_for_once_across_a_preemption() -> None:
    """The rows reported before the preemption are computed again but not reported again."""
    engine = SchedulerHarness(chunk=16)
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    request = engine.add(1, prompt(1, 40), sampling=sampling)
    engine.step()
    engine.step()
    assert request.n_prompt_scored == 32
    engine.evict(1, requeue=True)
    scored: list[tuple[int, int]] = []
    for _ in range(8):
        plan = engine.step()
        scored += [(c.start, c.end) for c in plan.prefill if c.prompt_logprobs is not None]
    assert scored == [(32, 40)]
    assert request.n_prompt_scored == 39
    engine.check_all_ended()


def test_prompt_logprobs_are_not_asked_for_of_output_tokens() -> None:
    engine = SchedulerHarness(chunk=64)
    sampling = SamplingParams(max_tokens=6, prompt_logprobs=0, ignore_eos=True)
    engine.add(1, prompt(1, 20), sampling=sampling)
    for _ in range(3):
        engine.step()
    engine.evict(1, requeue=True)
    plan = engine.step()
    assert [(c.start, c.end, c.prompt_logprobs) for c in plan.prefill] == [(0, 19, None)], (
        "rows that are reported stay in chunks of their own"
    )
    plan = engine.step()
    assert [(c.start, c.end, c.prompt_logprobs) for c in plan.prefill] == [(19, 23, None)]
    engine.run()
