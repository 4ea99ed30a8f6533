"""The host as a second tier of the prefix cache: what is kept, found again and dropped, and no
block used while a copy may touch it.
"""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from engine_actor.core.block_copies import BlockCopy, CopyList, CopyQueue, batches
from engine_actor.core.kv_manager import KVManager
from engine_actor.core.sequence import Sequence as Request
from tests.core.test_kv_manager import BLOCK, cached_after, compute, request
from tests.doubles.scheduler_harness import SchedulerHarness


def patient(n_blocks: int, **more: int) -> KVManager:
    """Every copy that may queue does."""
    kv = KVManager(n_blocks, BLOCK, **more)
    kv.copies.few = 0
    return kv


def visited(kv: KVManager, *prompts: Request) -> CopyList:
    """Compute prompts one after the other; returns the copies that this asked for."""
    for seq in prompts:
        compute(kv, seq)
        kv.release(seq)
        kv.check([])
    return kv.copies.take()


def outs(copies: CopyList) -> list[int]:
    return [copy.block for copy in copies.copies if copy.to_host]


def backs(copies: CopyList) -> list[tuple[int, int]]:
    return [(copy.slot, copy.block) for copy in copies.copies if not copy.to_host]


def test_what_is_evicted_comes_back_from_the_host() -> None:
    kv = patient(4, host_slots=8)
    copies = visited(kv, request(range(16)), request(range(100, 116)))
    assert (copies.ticket, outs(copies), backs(copies)) == (1, [3, 2, 1, 0], [])
    assert len(kv.tier) == 4
    again = request(range(17))
    assert kv.match(again) == 16
    kv.check([again])
    copies = kv.copies.take()
    # Out goes what makes room, in comes the prefix, parents first, each from where it went.
    assert [copy.to_host for copy in copies.copies] == [True] * 4 + [False] * 4
    assert [slot for slot, _ in backs(copies)] == [3, 2, 1, 0]
    assert [block for _, block in backs(copies)] == again.blocks
    assert again.copy_ticket == copies.ticket == 2
    assert (kv.tier.n_copied_out, kv.tier.n_copied_back) == (8, 4)
    kv.release(again)
    assert again.copy_ticket == 0


def test_a_copy_that_is_kept_is_not_made_twice() -> None:
    kv = patient(4, host_slots=8)
    visited(kv, request(range(16)), request(range(100, 116)))
    # Its last block is computed once more, the three before it come back.
    copies = visited(kv, request(range(16)))
    assert (len(outs(copies)), len(backs(copies))) == (4, 3)
    copies = visited(kv, request(range(100, 116)))
    assert (len(outs(copies)), len(backs(copies))) == (0, 3)


def test_off_by_default_and_without_a_prefix_cache() -> None:
    for kv in (KVManager(2, BLOCK), KVManager(2, BLOCK, prefix_cache=False, host_slots=4)):
        assert visited(kv, request(range(8)), request(range(50, 58))).copies == ()
        assert cached_after(kv, request(range(9))) == 0


def test_the_oldest_makes_room_and_never_a_parent_before_its_child() -> None:
    kv = patient(4, host_slots=3)
    visited(kv, request(range(16)), request(range(100, 116)))
    # The last of four blocks went out first and had to go for the first of all.
    assert len(kv.tier) == 3
    # What is to come back does not go for what makes room.
    assert cached_after(kv, request(range(17))) == 12
    kv.check([])


def test_a_child_is_not_restored_without_its_parents() -> None:
    kv = patient(6, host_slots=8)
    visited(kv, request(range(16)), request(range(100, 124)))
    kv.in_memory = 1
    again = request(range(17))
    assert kv.match(again) <= 4
    kv.check([again])
    kv.release(again)
    kv.check([])


def test_what_two_prompts_share_is_restored_once() -> None:
    kv = patient(8, host_slots=16)
    visited(kv, request(range(16)), request(range(100, 132)))
    first, second = request(range(17)), request([*range(12), 90, 91, 92, 93, 94])
    assert kv.match(first) == 16
    assert kv.match(second) == 12
    assert second.blocks == first.blocks[:3]
    assert second.copy_ticket == first.copy_ticket > 0
    assert len(backs(kv.copies.take())) == 4
    kv.check([first, second])


def test_whoever_gets_a_block_that_a_copy_still_reads_has_its_ticket() -> None:
    kv = patient(4, host_slots=8)
    visited(kv, request(range(16)))
    other = request(range(100, 110))
    compute(kv, other)
    ticket = kv.copies.take().ticket
    assert other.copy_ticket == ticket
    # It ends at once; its last block is free again, the copy out of it is not made yet.
    kv.release(other)
    third = request(range(200, 216))
    compute(kv, third)
    assert third.copy_ticket >= ticket
    kv.release(third)
    kv.copies.landed = kv.copies.take().ticket
    fourth = request(range(16))
    kv.match(fourth)
    assert fourth.copy_ticket == 0 or kv.copies.take().copies


def test_few_copies_do_not_queue_and_keep_their_order() -> None:
    kv = KVManager(4, BLOCK, host_slots=8)
    visited(kv, request(range(16)), request(range(100, 116)))
    again = request(range(16))
    kv.match(again)
    asked = kv.copies.take()
    assert (asked.ticket, asked.copies, again.copy_ticket) == (0, (), 0)
    assert [copy.to_host for copy in asked.first] == [True] * 3 + [False] * 3
    kv.copies.few = 2
    kv.release(again)
    kv.match(other := request(range(100, 117)))
    asked = kv.copies.take()
    assert asked.first == ()
    assert other.copy_ticket == asked.ticket > 0


def test_a_stream_that_needs_a_block_now_does_not_queue_behind_a_prompts_copies() -> None:
    kv = patient(6, host_slots=8)
    visited(kv, request(range(20)))
    stream = request(range(50, 54))
    compute(kv, stream)
    kv.copies.take()
    assert kv.grow(stream, 8, urgent=True)
    asked = kv.copies.take()
    assert (asked.ticket, asked.copies, [copy.to_host for copy in asked.first]) == (0, (), [True])
    assert stream.copy_ticket == 0
    # A copy that another has to come after takes its place in the queue.
    queue = CopyQueue()
    queue.add(1, 0, to_host=False)
    queue.add(2, 0, to_host=True, urgent=True)
    queue.add(1, 3, to_host=True, urgent=True)
    queue.add(5, 4, to_host=True, urgent=True)
    asked = queue.take()
    assert [copy.block for copy in asked.copies] == [1, 2, 1]
    assert [copy.block for copy in asked.first] == [5]


def test_a_shrink_keeps_what_the_host_has_and_copies_nothing() -> None:
    kv = patient(4, host_slots=8)
    visited(kv, request(range(16)), request(range(100, 116)), request(range(16)))
    kv.resize(1)
    kv.check([])
    assert kv.copies.take().copies == ()
    kv.resize(5)
    assert cached_after(kv, request(range(17))) == 16
    assert cached_after(kv, request(range(100, 117))) == 16
    kv.check([])


def test_a_shrink_forgets_what_lost_its_parent() -> None:
    kv = patient(5, host_slots=8)
    visited(kv, request(range(20)))
    visited(kv, request(range(100, 108)))
    assert len(kv.tier) == 2
    kv.resize(1)
    kv.check([])
    # The first three blocks of the chain had no copy yet.
    assert len(kv.tier) == 0


def test_what_is_gone_from_the_device_alone_is_no_eviction() -> None:
    kv = patient(4, host_slots=4)
    visited(kv, request(range(16)))
    assert len(kv.take_events()[0]) == 4
    visited(kv, request(range(100, 116)))
    added, evicted = kv.take_events()
    assert (len(added), len(evicted)) == (4, 0)
    kv.reset_prefix_cache()
    assert (len(kv.take_events()[1]), len(kv.tier)) == (8, 0)


def test_a_block_computed_once_more_takes_the_hosts_copy_as_its_own() -> None:
    kv = patient(4, host_slots=8)
    visited(kv, request(range(16)), request(range(100, 116)))
    kv.take_events()
    scoring = request(range(16), prompt_logprobs=0)
    assert compute(kv, scoring) == 0
    kv.check([scoring])
    kv.release(scoring)
    kv.copies.take()
    assert kv.take_events() == ((), ())
    assert outs(visited(kv, request(range(200, 216)))) == []


@given(
    st.lists(
        st.builds(BlockCopy, st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=12
    ),
    st.randoms(use_true_random=False),
)
def test_batches_are_the_list_in_any_order_within_each(
    copies: list[BlockCopy], draw: random.Random
) -> None:
    def run(order: list[BlockCopy]) -> tuple[dict[int, int], dict[int, int]]:
        cells = {block: block for block in range(5)}
        host = {slot: 10 + slot for slot in range(4)}
        for block, slot, to_host in order:
            if to_host:
                host[slot] = cells[block]
            else:
                cells[block] = host[slot]
        return cells, host

    parts = [list(part) for part in batches(copies)]
    assert [copy for part in parts for copy in part] == copies
    for part in parts:
        draw.shuffle(part)
    assert run([copy for part in parts for copy in part]) == run(copies)


def test_tickets_count_lists_and_go_with_what_has_landed() -> None:
    queue = CopyQueue()
    assert queue.take().ticket == 0
    queue.add(3, 0, to_host=True)
    assert (queue.take().ticket, queue.take().ticket) == (1, 0)
    queue.add(3, 0, to_host=False)
    queue.add(4, 1, to_host=True)
    assert (queue.ticket_of(3), queue.ticket_of(4), queue.ticket_of(5)) == (2, 2, 0)
    queue.landed = 1
    assert queue.ticket_of(3) == 2
    queue.landed = 2
    queue.landed = 1
    assert (queue.ticket_of(3), queue.landed) == (0, 2)


def test_a_prompt_waits_beside_a_stream_and_not_without_one() -> None:
    engine = SchedulerHarness(n_blocks=12, block_tokens=4, host_slots=20, chunk=64)
    prefix = [1, 2, 3, 4] * 4
    engine.add(1, prefix, 1)
    engine.run()
    engine.add(2, [5] * 44, 1)
    engine.run()
    engine.add(3, [6, 7], 12)
    engine.step()
    again = engine.add(4, [*prefix, 9], 1)
    plans = [engine.step() for _ in range(4)]
    assert again.n_cached == 16
    assert [len(plan.prefill) for plan in plans] == [0] * 4
    assert all(plan.decode for plan in plans)
    engine.land(100)
    plan = engine.step()
    assert (plan.prefill[0].start, plan.prefill[0].end) == (16, 17)
    engine.run()
    # Alone it starts at once, and the device waits.
    engine.add(5, [8] * 44, 1)
    engine.run()
    engine.add(6, [*prefix, 9], 1)
    plan = engine.step()
    assert plan.prefill[0].start == 16
    assert plan.waits_for == plan.copies.ticket > 0
    engine.run()


def test_a_prompt_cancelled_while_its_copies_are_under_way_leaves_what_it_restored() -> None:
    engine = SchedulerHarness(n_blocks=12, block_tokens=4, host_slots=20)
    prefix = [1, 2, 3, 4] * 4
    engine.add(1, prefix, 1)
    engine.run()
    engine.add(2, [5] * 44, 1)
    engine.run()
    engine.add(3, [6, 7], 16)
    engine.step()
    engine.add(4, [*prefix, 9], 1)
    engine.step()
    engine.cancel(4)
    copied = engine.kv.tier.n_copied_back
    assert copied == 4
    again = engine.add(5, [*prefix, 8], 1)
    engine.run()
    assert again.n_cached == 16
    assert engine.kv.tier.n_copied_back == copied
