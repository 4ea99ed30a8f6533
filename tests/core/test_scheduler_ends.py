"""How a sequence ends: tokens, lengths, cancels, evictions, deadlines, failures; and refusals."""

from __future__ import annotations

import pytest

from engine_actor.core.params import InvalidParam, SamplingParams
from engine_actor.core.plan import Refusal
from engine_actor.core.sequence import FinishReason, SeqState
from engine_actor.errors import ContextLengthExceeded, Overloaded
from tests.doubles.paged_model import EOS, Fault, solo_run
from tests.doubles.scheduler_harness import SchedulerHarness

PROMPT = [3, 1, 4, 1, 5]


def first_stop(prompt: list[int]) -> int:
    """The number of output tokens up to and with the first EOS."""
    output, reason = solo_run(prompt, SamplingParams(max_tokens=200))
    assert reason is FinishReason.STOP
    return len(output)


@pytest.mark.parametrize("depth", [0, 1])
def test_eos_ends_a_text_and_is_its_last_token(depth: int) -> None:
    engine = SchedulerHarness(depth=depth)
    request = engine.add(1, PROMPT, sampling=SamplingParams(max_tokens=200))
    ends = []
    while engine.scheduler.has_work:
        engine.plan()
        if depth == 0 or engine.model.n_open > 1 or engine.plans[-1].empty:
            ends += engine.join()
    (end,) = ends
    assert (end.seq, end.reason, end.stop_token) == (request, FinishReason.STOP, EOS)
    assert request.n_output == first_stop(PROMPT)
    assert request.tokens[-1] == EOS
    engine.check_all_ended()


def test_ignore_eos_min_tokens_and_stop_token_ids() -> None:
    n_first = first_stop(PROMPT)
    engine = SchedulerHarness()
    engine.add(1, PROMPT, sampling=SamplingParams(max_tokens=n_first + 3, ignore_eos=True))
    engine.add(2, PROMPT, sampling=SamplingParams(max_tokens=200, min_tokens=n_first))
    stop = solo_run(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))[0][2]
    engine.add(3, PROMPT, sampling=SamplingParams(max_tokens=200, stop_token_ids=(stop,)))
    engine.run()
    assert engine.requests["c", 1].n_output == n_first + 3
    assert engine.requests["c", 2].n_output > n_first
    assert engine.requests["c", 3].n_output <= 3
    assert engine.ended["c", 3] == (FinishReason.STOP, None)


def test_a_stop_token_at_the_last_allowed_place_is_a_stop() -> None:
    n_first = first_stop(PROMPT)
    engine = SchedulerHarness()
    engine.add(1, PROMPT, sampling=SamplingParams(max_tokens=n_first))
    engine.run()
    assert engine.ended["c", 1] == (FinishReason.STOP, None)


def test_too_large_for_the_pool_is_refused_at_the_door_and_the_next_is_served() -> None:
    """B-08: it would wait for ever and block the queue."""
    engine = SchedulerHarness(n_blocks=4)
    with pytest.raises(ContextLengthExceeded, match=r"needs 150 tokens, the KV pool holds 64$"):
        engine.add(1, range(50), max_tokens=100)
    engine.add(2, range(10), max_tokens=54)
    engine.run()
    assert engine.ended == {("c", 2): (FinishReason.LENGTH, None)}


def test_too_large_for_the_context_an_empty_prompt_and_a_used_key_are_refused() -> None:
    engine = SchedulerHarness(max_model_len=32)
    with pytest.raises(ContextLengthExceeded, match=r"needs 33 tokens, the context holds 32$"):
        engine.add(1, range(30), max_tokens=3)
    with pytest.raises(InvalidParam, match="prompt"):
        engine.add(2, [])
    engine.add(3, [1])
    with pytest.raises(ValueError, match="in use"):
        engine.add(3, [1])
    engine.run()


def test_a_full_queue_refuses_and_preempted_sequences_never_are() -> None:
    engine = SchedulerHarness(max_queue=2, max_num_seqs=1)
    engine.add(1, PROMPT)
    engine.step()
    engine.add(2, PROMPT)
    engine.add(3, PROMPT)
    with pytest.raises(Overloaded, match="2 requests"):
        engine.add(4, PROMPT)
    engine.evict(1, requeue=True)
    assert len(engine.scheduler.waiting) == 3
    engine.run()


def test_who_will_run_in_the_next_step_does_not_fill_the_queue() -> None:
    """300 prompts of one request to an idle engine of 128 sequences and a queue of 256: a retry of
    a refused one would be refused for ever."""
    engine = SchedulerHarness(max_queue=2, max_num_seqs=3)
    for rid in range(5):
        engine.add(rid, PROMPT)
    with pytest.raises(Overloaded, match="2 requests"):
        engine.add(5, PROMPT)
    engine.step()
    assert len(engine.scheduler.waiting) == 2
    with pytest.raises(Overloaded):
        engine.add(5, PROMPT)
    engine.run()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
def test_cancel_in_every_state_gives_all_blocks_back(depth: int, steps: int) -> None:
    engine = SchedulerHarness(depth=depth, chunk=8)
    request = engine.add(1, range(20), max_tokens=30)
    other = engine.add(2, [5, *range(20)], max_tokens=9)
    for _ in range(steps):
        engine.step()
    assert engine.cancel(1) is request
    assert (request.state, request.finish) == (SeqState.DONE, FinishReason.CANCELLED)
    assert engine.cancel(1) is None
    assert engine.scheduler.cancel(("nobody", 1)) is None
    engine.run()
    assert other.finish is FinishReason.LENGTH


def test_blocks_of_a_sequence_cancelled_in_flight_come_back_only_after_the_join() -> None:
    """B-10: the kernel may still write them; a new request must not get them before."""
    engine = SchedulerHarness(n_blocks=4, prefix_cache=False)
    request = engine.add(1, range(30), max_tokens=10)
    engine.plan()
    held = list(request.blocks)
    engine.cancel(1)
    assert (request.blocks, engine.kv.n_free) == (held, 2)
    assert not engine.scheduler.running
    late = engine.add(2, range(100, 130), max_tokens=2)
    engine.join()
    assert (request.blocks, engine.kv.n_free) == ([], 4)
    assert request.n_output == 0, "a late token of a cancelled sequence was accepted"
    engine.step()
    assert late.blocks
    engine.run()


def test_at_depth_1_a_new_request_waits_for_blocks_still_in_flight() -> None:
    """B-10: the plan is made while the cancelled sequence's step is open."""
    engine = SchedulerHarness(n_blocks=3, depth=1, prefix_cache=False)
    engine.add(1, range(40), max_tokens=6)
    engine.plan()
    engine.cancel(1)
    late = engine.add(2, range(100, 130), max_tokens=2)
    assert engine.plan().empty
    assert late in engine.scheduler.waiting
    engine.join()
    assert [chunk.key for chunk in engine.plan().prefill] == [late.key]
    engine.join()
    engine.run()


def test_a_key_may_be_used_again_while_its_last_life_is_in_flight() -> None:
    engine = SchedulerHarness(depth=1)
    request = engine.add(1, PROMPT, max_tokens=9)
    engine.step()
    engine.scheduler.cancel(request.key)
    again = engine.add(1, PROMPT, max_tokens=9)
    engine.run()
    assert (request.n_output, again.n_output) == (0, 9)


def test_eviction_ends_oom_or_starts_again_with_the_same_text() -> None:
    engine = SchedulerHarness()
    for rid in (1, 2, 3):
        engine.add(rid, [rid, *PROMPT], max_tokens=12)
    for _ in range(4):
        engine.step()
    free = engine.kv.n_free
    assert engine.evict(1) is not None
    assert engine.kv.n_free == free + 1
    again = engine.evict(2, requeue=True)
    assert again is not None
    assert (again.state, again.blocks, again.n_output) == (SeqState.WAITING, [], 4)
    assert engine.evict(2, requeue=True) is again
    assert engine.scheduler.evict(("c", 99), requeue=True) is None
    engine.run()
    assert engine.ended["c", 1] == (FinishReason.OOM, "out_of_memory")
    assert engine.scheduler.stats.preemptions == 1


def test_deadlines_end_waiting_and_running_sequences_on_the_injected_clock() -> None:
    engine = SchedulerHarness(max_num_seqs=1)
    running = engine.add(1, PROMPT, max_tokens=500, deadline=0.05)
    waiting = engine.add(2, PROMPT, max_tokens=500, deadline=0.03)
    served = engine.add(3, PROMPT, max_tokens=5, deadline=100.0)
    refused: list[Refusal] = []
    while engine.scheduler.has_work:
        refused += engine.step().refused
    assert refused == [
        Refusal(waiting.key, FinishReason.ERROR, "deadline_exceeded"),
        Refusal(running.key, FinishReason.ERROR, "deadline_exceeded"),
    ]
    assert (running.n_output, waiting.n_output) == (5, 0)
    assert served.finish is FinishReason.LENGTH
    engine.check_all_ended()


def test_a_failure_ends_one_and_a_retry_costs_the_others_nothing() -> None:
    """B-22: the four OOM cases of the engine come down to these outcomes."""
    faults = {("c", 2): ["fail"], ("c", 3): ["retry", "retry"], ("c", 4): ["partial", "silent"]}

    def fault(key: tuple[str, int], n_tokens: int) -> Fault | None:
        kinds = faults.get(key)
        return Fault(kinds.pop(0)) if kinds else None

    for depth in (0, 1):
        faults = {("c", 2): ["fail"], ("c", 3): ["retry"] * 3, ("c", 4): ["partial", "silent"]}
        engine = SchedulerHarness(chunk=40, depth=depth, fault=fault)
        for rid in range(1, 6):
            engine.add(rid, [rid, *range(20)], max_tokens=7)
        engine.run()
        assert engine.ended["c", 2] == (FinishReason.OOM, "out_of_memory")
        assert [engine.ended["c", rid][0] for rid in (1, 3, 4, 5)] == [FinishReason.LENGTH] * 4
        assert not any(faults.values())


def test_a_retry_stays_as_it_was() -> None:
    faults: list[Fault | None] = [None, Fault("retry")]
    engine = SchedulerHarness(fault=lambda key, n: faults.pop(0) if faults else None)
    request = engine.add(1, PROMPT, max_tokens=3)
    engine.step()
    before = (request.n_computed, list(request.tokens), request.blocks[:], request.state)
    slot = engine.step().decode[0]
    assert before == (request.n_computed, request.tokens, request.blocks, request.state)
    assert request.n_scheduled == request.n_computed
    assert engine.step().decode[0] == slot
    engine.run()


def test_the_victim_is_the_youngest_of_the_lowest_priority() -> None:
    engine = SchedulerHarness()
    for rid, priority in [(1, 0), (2, 1), (3, 1), (4, 0)]:
        engine.add(rid, PROMPT, priority=priority)
    victim = engine.scheduler.victim
    assert victim([("c", rid) for rid in (1, 2, 3, 4)]) == ("c", 3)
    assert victim([("c", 1), ("c", 4)]) == ("c", 4)
    engine.cancel(1)
    assert victim([("c", 1), ("c", 4)]) == ("c", 1)
    with pytest.raises(ValueError, match="empty"):
        victim([])
    engine.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_ends_everything_once(depth: int) -> None:
    engine = SchedulerHarness(depth=depth, max_num_seqs=2)
    for rid in range(4):
        engine.add(rid, PROMPT)
    engine.plan()
    ends = engine.scheduler.abort_all("engine_restarted")
    assert [(end.seq.key[1], end.reason, end.code) for end in ends] == [
        (rid, FinishReason.ERROR, "engine_restarted") for rid in range(4)
    ]
    assert engine.join() == ()
    assert not engine.scheduler.has_work
    assert engine.kv.n_free == engine.kv.capacity


def test_outcomes_are_taken_in_order_and_plans_stay_within_the_depth() -> None:
    engine = SchedulerHarness(depth=1)
    engine.add(1, PROMPT, max_tokens=9)
    engine.plan()
    engine.plan()
    with pytest.raises(RuntimeError, match="not committed"):
        engine.scheduler.plan()
    engine.model.join()
    with pytest.raises(RuntimeError, match="not the oldest"):
        engine.scheduler.commit(engine.model.join())
