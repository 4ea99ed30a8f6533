"""Prefix sharing between requests: hits, waiting for a running prefill of the same prefix."""

from __future__ import annotations

import pytest

from tests.doubles.scheduler_harness import SchedulerHarness

SYSTEM = [7, *range(63)]


def test_the_same_prompt_twice_gives_the_same_text_and_computes_at_least_one_token() -> None:
    """B-05: a prompt of exactly k blocks, cached whole."""
    engine = SchedulerHarness()
    first = engine.add(1, SYSTEM, max_tokens=6)
    engine.run()
    assert engine.model.computed_tokens == 64 + 5
    second = engine.add(2, SYSTEM, max_tokens=6)
    engine.run()
    assert second.tokens == first.tokens
    assert (first.n_cached, second.n_cached) == (0, 48)
    assert engine.model.computed_tokens == 69 + 16 + 5


@pytest.mark.parametrize("depth", [0, 1])
def test_n_sequences_of_one_prompt_compute_it_once(depth: int) -> None:
    """n=4: the other three wait for the prefill that computes their blocks, then share them."""
    engine = SchedulerHarness(chunk=16, depth=depth)
    requests = [engine.add(rid, [*SYSTEM, 5], max_tokens=1) for rid in range(4)]
    engine.step()
    assert [seq.key[1] for seq in engine.scheduler.running] == [0]
    engine.run()
    assert [request.n_cached for request in requests] == [0, 64, 64, 64]
    assert engine.model.computed_tokens == 65 + 3


def test_a_shared_system_prompt_is_computed_once_and_others_pass_by() -> None:
    engine = SchedulerHarness(chunk=16, max_partial_prefills=4)
    engine.add(1, [*SYSTEM, 1, 1, 1])
    held = engine.add(2, [*SYSTEM, 2, 2])
    other = engine.add(3, [9, 9, 9])
    engine.step()
    assert held in engine.scheduler.waiting
    assert other in engine.scheduler.running
    engine.run()
    assert held.n_cached == 64


def test_other_salts_and_scoring_requests_do_not_wait() -> None:
    engine = SchedulerHarness(chunk=16)
    engine.add(1, [*SYSTEM, 1])
    salted = engine.add(2, [*SYSTEM, 1], salt="tenant")
    engine.step()
    assert salted in engine.scheduler.running
    engine.run()
    assert salted.n_cached == 0


def test_the_wait_ends_with_the_prefill_that_is_waited_for() -> None:
    engine = SchedulerHarness(chunk=16)
    engine.add(1, [*SYSTEM, 1])
    held = engine.add(2, [*SYSTEM, 2])
    engine.step()
    engine.step()
    assert held in engine.scheduler.waiting
    engine.cancel(1)
    engine.step()
    assert held in engine.scheduler.running
    assert held.n_cached == 32
    engine.run()


def test_an_urgent_request_does_not_wait_for_the_prefill_of_a_patient_one() -> None:
    engine = SchedulerHarness(chunk=16)
    engine.add(1, [*SYSTEM, 1], priority=1)
    engine.step()
    urgent = engine.add(2, [*SYSTEM, 2], priority=0)
    assert [chunk.key for chunk in engine.step().prefill] == [urgent.key]
    engine.run()


def test_without_a_prefix_cache_nobody_waits() -> None:
    engine = SchedulerHarness(chunk=16, prefix_cache=False)
    for rid in range(3):
        engine.add(rid, SYSTEM)
    engine.step()
    assert len(engine.scheduler.running) == 3
    engine.run()
    assert engine.model.computed_tokens == 3 * (64 + 3)


def test_a_preempted_sequence_finds_its_own_blocks_but_reports_no_cached_tokens() -> None:
    engine = SchedulerHarness()
    request = engine.add(1, [*SYSTEM, 1], max_tokens=8)
    for _ in range(3):
        engine.step()
    engine.evict(1, requeue=True)
    plan = engine.step()
    assert (plan.prefill[0].start, plan.prefill[0].end) == (64, 67)
    engine.run()
    assert (request.n_cached, request.n_preempted) == (0, 1)


def test_a_start_that_did_not_fit_after_all_leaves_no_trace() -> None:
    """The idle blocks it would share count as free until it holds them."""
    engine = SchedulerHarness(n_blocks=4)
    request = engine.add(1, range(33), max_tokens=4)
    engine.step()
    engine.evict(1, requeue=True)
    other = engine.add(2, [9], max_tokens=2, priority=-1)
    engine.plan()
    assert (list(engine.scheduler.running), request.blocks) == ([other], [])
    engine.join()
    engine.run()
    assert (request.n_cached, request.n_preempted) == (0, 1)


def test_many_held_requests_cost_a_bounded_look() -> None:
    engine = SchedulerHarness(chunk=16, max_num_seqs=128)
    for rid in range(100):
        engine.add(rid, [*SYSTEM, rid], max_tokens=1)
    engine.run()
    assert engine.model.computed_tokens == 65 + 99


def test_reset_of_the_prefix_cache_under_load_changes_no_text() -> None:
    engine = SchedulerHarness(chunk=16)
    for rid in range(4):
        engine.add(rid, [*SYSTEM, rid], max_tokens=20)
    for _ in range(7):
        engine.step()
        engine.kv.reset_prefix_cache()
        engine.scheduler.check()
    engine.run()
