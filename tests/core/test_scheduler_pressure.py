"""A pool that is too small: preemption, progress, limits that shrink under load."""

from __future__ import annotations

import pytest

from engine_actor.core.params import InvalidParam
from engine_actor.core.sequence import FinishReason
from engine_actor.errors import ContextLengthExceeded
from tests.doubles.scheduler_harness import SchedulerHarness


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_takes_the_youngest_and_its_text_stays_the_same(depth: int) -> None:
    engine = SchedulerHarness(n_blocks=6, depth=depth)
    for rid in range(3):
        engine.add(rid, [rid, *range(14)], max_tokens=45)
    while not engine.scheduler.stats.preemptions:
        plan = engine.step()
    assert plan.preempted == (("c", 2),)
    engine.run()
    assert engine.end_order == [("c", 0), ("c", 1), ("c", 2)]


def test_preemption_takes_the_lowest_priority_before_the_youngest() -> None:
    engine = SchedulerHarness(n_blocks=6)
    for rid, priority in [(0, 0), (1, 1), (2, 0)]:
        engine.add(rid, [rid, *range(14)], max_tokens=45, priority=priority)
    while not engine.scheduler.stats.preemptions:
        plan = engine.step()
    assert plan.preempted == (("c", 1),)
    engine.run()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_two_that_do_not_fit_together_end_one_after_the_other(
    depth: int, prefix_cache: bool
) -> None:
    """No livelock: the first in rank is never preempted, so each step brings it nearer its end."""
    engine = SchedulerHarness(n_blocks=4, depth=depth, prefix_cache=prefix_cache)
    first = engine.add(1, [1, *range(14)], max_tokens=49)
    second = engine.add(2, [2, *range(14)], max_tokens=49)
    steps = engine.run(max_steps=200)
    assert (first.n_preempted, engine.end_order) == (0, [first.key, second.key])
    assert second.n_preempted <= 3
    assert steps < 49 * 2 + 20


def test_a_preempted_sequence_does_not_come_back_in_the_same_plan() -> None:
    engine = SchedulerHarness(n_blocks=4, max_num_seqs=4)
    engine.add(1, [1, *range(14)], max_tokens=49)
    engine.add(2, [2, *range(14)], max_tokens=20)
    while engine.scheduler.has_work:
        plan = engine.step()
        started = {chunk.key for chunk in plan.prefill if chunk.start == 0}
        assert not (plan.preempted and started)
    engine.check_all_ended()


def test_a_token_in_flight_when_its_sequence_is_preempted_is_kept() -> None:
    """Depth 1: it was computed from valid KV; dropping it would cost a step for nothing."""
    engine = SchedulerHarness(n_blocks=64, depth=1)
    request = engine.add(1, range(20), max_tokens=9)
    engine.plan()
    engine.evict(1, requeue=True)
    assert request.blocks, "blocks stay until the join"
    assert engine.plan().empty
    engine.join()
    assert (request.n_output, request.blocks) == (1, [])
    engine.run()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("warm_steps", [0, 1, 3, 20])
def test_limit_halves_the_pool_with_nothing_lost(depth: int, warm_steps: int) -> None:
    engine = SchedulerHarness(n_blocks=16, depth=depth, chunk=32)
    for rid in range(5):
        engine.add(rid, [rid, *range(20)], max_tokens=30)
    for _ in range(warm_steps):
        engine.step()
    engine.scheduler.limit(kv_fraction=0.5)
    engine.scheduler.check()
    for _ in range(3):
        engine.step()
    assert engine.kv.capacity == 8
    assert engine.kv.extent <= 8, "blocks above the new capacity are still in use"
    engine.run()
    assert {reason for reason, _ in engine.ended.values()} == {FinishReason.LENGTH}
    engine.scheduler.limit(kv_fraction=1.0)
    assert engine.kv.n_free == 16


def test_limit_while_a_step_is_in_flight_takes_no_block_from_it() -> None:
    engine = SchedulerHarness(n_blocks=16)
    requests = [engine.add(rid, [rid, *range(40)], max_tokens=9) for rid in range(4)]
    engine.plan()
    blocks = [list(request.blocks) for request in requests]
    engine.scheduler.limit(kv_fraction=0.5)
    assert [request.blocks for request in requests] == blocks
    engine.join()
    engine.run()


def test_a_shrink_stops_at_what_the_largest_live_request_needs_until_it_ends() -> None:
    engine = SchedulerHarness(n_blocks=16)
    engine.add(1, range(100), max_tokens=60)
    engine.add(2, range(300, 310), max_tokens=200)
    for _ in range(4):
        engine.step()
    engine.scheduler.limit(kv_fraction=0.25)
    with pytest.raises(ContextLengthExceeded, match="the KV pool holds 64"):
        engine.add(3, range(60), max_tokens=10)
    engine.step()
    assert engine.kv.capacity == 14  # 210 tokens
    engine.run()
    engine.add(4, range(10))
    engine.run()
    assert engine.kv.capacity == 4
    assert engine.requests["c", 2].finish is FinishReason.LENGTH


def test_limit_of_running_sequences_preempts_the_last_in_rank() -> None:
    engine = SchedulerHarness()
    for rid in range(4):
        engine.add(rid, [rid, *range(20)], max_tokens=9)
    engine.step()
    engine.scheduler.limit(max_num_seqs=2, prefill_chunk_tokens=5)
    plan = engine.step()
    assert plan.preempted == (("c", 3), ("c", 2))
    assert engine.scheduler.stats.running == 2
    engine.scheduler.limit(max_num_seqs=16)
    engine.run()


def test_limits_are_checked_and_a_bad_one_changes_nothing() -> None:
    engine = SchedulerHarness()
    before = engine.scheduler.limits
    for fraction in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(InvalidParam, match="kv_fraction"):
            engine.scheduler.limit(kv_fraction=fraction, max_num_seqs=1)
    with pytest.raises(InvalidParam, match="max_num_seqs"):
        engine.scheduler.limit(kv_fraction=0.5, max_num_seqs=0)
    with pytest.raises(InvalidParam, match="prefill_chunk_tokens"):
        engine.scheduler.limit(prefill_chunk_tokens=0)
    assert engine.scheduler.limits == before
    assert engine.kv.capacity == 64


def test_no_limit_goes_beyond_the_start() -> None:
    """Memory is planned for so many sequences and tokens a step."""
    engine = SchedulerHarness(max_num_seqs=3, chunk=16)
    for asked, given in (((2, 8), (2, 8)), ((100, 4096), (3, 16))):
        engine.scheduler.limit(max_num_seqs=asked[0], prefill_chunk_tokens=asked[1])
        limits = engine.scheduler.limits
        assert (limits.max_num_seqs, limits.prefill_chunk_tokens) == given


def test_the_pool_grows_and_shrinks_with_its_budget() -> None:
    engine = SchedulerHarness(n_blocks=4)
    with pytest.raises(ContextLengthExceeded):
        engine.add(1, range(50), max_tokens=100)
    engine.scheduler.resize(32)
    engine.add(2, range(50), max_tokens=100)
    engine.step()
    engine.scheduler.limit(kv_fraction=0.5)
    engine.scheduler.resize(24)
    engine.run()
    assert engine.kv.capacity == 12
    with pytest.raises(InvalidParam, match="n_blocks"):
        engine.scheduler.resize(0)


def test_the_pool_shrinks_to_what_there_is_whoever_needs_more() -> None:
    """The device has nine blocks, one request may come to need twelve: none is promised that does
    not exist, it ends `oom` when it needs the tenth, and neither it nor a waiting one that holds
    more than nine already keeps the others waiting."""
    engine = SchedulerHarness(n_blocks=64, max_num_seqs=3)
    bt = engine.kv.block_tokens
    large = engine.add(1, range(2 * bt), max_tokens=10 * bt)
    long = engine.add(2, range(11 * bt), max_tokens=bt)
    engine.add(3, [3, 4], max_tokens=2 * bt)
    engine.step()
    engine.scheduler.resize(9)
    assert engine.kv.capacity == 9
    engine.run()
    assert (large.finish, large.n_output) == (FinishReason.OOM, 7 * bt + 1)
    assert (long.finish, long.finish_code) == (FinishReason.OOM, "out_of_memory")
    assert engine.ended["c", 3][0] is FinishReason.LENGTH
    engine.scheduler.resize(64)
    again = engine.add(4, range(11 * bt), max_tokens=bt)
    engine.run()
    assert again.finish is FinishReason.LENGTH


def test_newcomers_leave_running_streams_room_to_grow() -> None:
    """Else each would be preempted again within a block's time."""
    engine = SchedulerHarness(n_blocks=8, max_num_seqs=8)
    for rid in range(8):
        engine.add(rid, [rid, *range(14)], max_tokens=17)
    engine.run()
    assert engine.scheduler.stats.preemptions == 0


def test_shared_prefixes_at_a_full_pool_never_give_a_wrong_text() -> None:
    """B-06: 12 blocks, 8 clients, 50 requests each from 4 shared prefixes."""
    engine = SchedulerHarness(n_blocks=12, max_num_seqs=8)
    prefixes = [[base, *range(32)] for base in range(4)]
    sent = [0] * 8
    while sum(sent) < 400 or engine.scheduler.has_work:
        busy = {seq.key[1] % 8 for seq in (*engine.scheduler.waiting, *engine.scheduler.running)}
        for client in range(8):
            if client not in busy and sent[client] < 50:
                rid = sent[client] * 8 + client
                engine.add(rid, [*prefixes[(rid * 7) % 4], client], max_tokens=2 + rid % 61)
                sent[client] += 1
        engine.step()
    assert engine.scheduler.stats.preemptions > 0
    engine.check_all_ended()


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)])
def test_a_pool_that_changes_again_still_ends_who_no_longer_fits(sizes: tuple[int, int]) -> None:
    engine = SchedulerHarness(n_blocks=3)
    engine.add(1, range(2, 42), max_tokens=2)
    for n_blocks in sizes:
        engine.scheduler.resize(n_blocks)
    engine.run()
    assert engine.ended["c", 1] == (FinishReason.OOM, "out_of_memory")
