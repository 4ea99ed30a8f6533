"""The two ends of a link on their own: order in, bounded receivers out."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.core.params import SamplingParams
from engine_actor.messages import Cancel, Extra, Flag, Message, StepBatch, Submit, Usage
from serve_app.demux import Demux, Receiver
from serve_app.mailbox import Mailbox
from serve_app.protocol.errors import ApiError

pytestmark = pytest.mark.anyio


def submit(rid: int) -> Submit:
    return Submit(rid, (1,), SamplingParams())


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["submit", "cancel", "withdraw"]), st.integers(0, 5))))
def test_a_mailbox_keeps_order_and_forgets_what_is_withdrawn(steps: list[tuple[str, int]]) -> None:
    """Model: a list. A rid is submitted at most once, as the link does it."""

    async def run() -> None:
        mailbox, model, seen = Mailbox(), list[Message](), set()
        for verb, rid in steps:
            if verb == "submit" and rid not in seen:
                seen.add(rid)
                mailbox.put(submit(rid))
                model.append(submit(rid))
            elif verb == "cancel":
                mailbox.put(Cancel(rid))
                model.append(Cancel(rid))
            elif verb == "withdraw":
                there = submit(rid) in model
                assert mailbox.withdraw(rid) is there
                if there:
                    model.remove(submit(rid))
        assert len(mailbox) == len(model)
        assert mailbox.take() == model
        assert len(mailbox) == 0

    asyncio.run(run())


def test_whoever_puts_a_message_hands_it_over() -> None:
    """Before anything else runs; a request's sequences together."""
    mailbox, taken = Mailbox(), list[list[Message]]()
    mailbox.put(submit(1))
    mailbox.on_put = lambda: taken.append(mailbox.take())
    mailbox.put()
    assert taken == []
    mailbox.put(submit(2), submit(3))
    mailbox.put(submit(4))
    assert taken == [[submit(1), submit(2), submit(3)], [submit(4)]]
    assert not mailbox.withdraw(4)
    mailbox.on_put = None
    mailbox.put(submit(5))
    mailbox.clear()
    assert not mailbox.withdraw(5)


def batch(
    *shares: tuple[int, tuple[int, ...], Flag], extra: dict[int, Extra] | None = None
) -> StepBatch:
    return StepBatch(
        seq=0,
        time_ns=0,
        rids=tuple(rid for rid, _, _ in shares),
        counts=tuple(len(tokens) for _, tokens, _ in shares),
        tokens=tuple(token for _, tokens, _ in shares for token in tokens),
        flags=tuple(flag for _, _, flag in shares),
        extra=tuple((extra or {}).items()),
    )


async def test_batches_are_merged_for_a_reader_that_is_late() -> None:
    overflowed: list[Receiver] = []
    demux = Demux(overflowed.append)
    receiver = Receiver(range(5, 7), capacity=100)
    demux.open(receiver)
    demux.deliver(batch((5, (1, 2), Flag.RUNNING), (99, (7,), Flag.RUNNING)))
    assert await receiver.next(0) == {}, "nothing before the engine has accepted"
    demux.accept([5, 6])
    demux.deliver(batch((6, (8,), Flag.RUNNING)))
    usage = Usage(1, 3, 0)
    end = {5: Extra(usage=usage, stop_token=3)}
    demux.deliver(batch((5, (3,), Flag.STOP), (6, (), Flag.REQUEUED), extra=end))
    parts = await receiver.next()
    assert parts[5].tokens == [1, 2, 3]
    assert (parts[5].flag, parts[5].usage, parts[5].stop_token) == (Flag.STOP, usage, 3)
    assert parts[5].finished
    assert (parts[6].tokens, parts[6].finished) == ([8], False)
    assert demux.live_rids(receiver) == [6]
    assert not overflowed


async def test_what_came_before_a_failure_is_read_first() -> None:
    demux = Demux(lambda receiver: None)
    receiver = Receiver(range(1, 2), capacity=100)
    demux.open(receiver)
    demux.accept([1])
    demux.deliver(batch((1, (4,), Flag.RUNNING)))
    demux.fail_all("engine_restarted")
    assert demux.live == 0
    assert (await receiver.next())[1].tokens == [4]
    with pytest.raises(ApiError) as caught:
        await receiver.next()
    assert caught.value.code == "engine_restarted"


async def test_a_refusal_of_one_is_a_refusal_of_all_and_hides_the_rest() -> None:
    demux = Demux(lambda receiver: None)
    receiver = Receiver(range(1, 4), capacity=100)
    demux.open(receiver)
    demux.deliver(batch((1, (4,), Flag.RUNNING)))
    demux.reject(2, "overloaded")
    demux.accept([1, 2, 3])
    with pytest.raises(ApiError) as caught:
        await receiver.next()
    assert caught.value.code == "overloaded"
    assert demux.live_rids(receiver) == [1, 3]


async def test_a_reader_too_far_behind_is_named() -> None:
    overflowed: list[Receiver] = []
    demux = Demux(overflowed.append)
    receiver = Receiver(range(1, 2), capacity=3)
    demux.open(receiver)
    demux.accept([1])
    demux.deliver(batch((1, (1, 2, 3), Flag.RUNNING)))
    assert not overflowed
    demux.deliver(batch((1, (4,), Flag.RUNNING)))
    assert overflowed == [receiver]


async def test_a_waiting_reader_wakes_and_a_patient_one_gets_nothing() -> None:
    demux = Demux(lambda receiver: None)
    receiver = Receiver(range(1, 3), capacity=10)
    demux.open(receiver)
    assert await receiver.next(0.001) == {}
    reader = asyncio.create_task(receiver.next())
    await asyncio.sleep(0)
    demux.deliver(batch((1, (1,), Flag.STOP)))
    await asyncio.sleep(0)
    assert not reader.done()
    demux.accept([1, 2])
    assert (await reader)[1].tokens == [1]


async def test_sequences_that_end_before_the_answer_to_their_post_are_accepted() -> None:
    demux = Demux(lambda receiver: None)
    receiver = Receiver(range(1, 3), capacity=10)
    demux.open(receiver)
    demux.deliver(batch((1, (1,), Flag.STOP)))
    assert await receiver.next(0) == {}
    demux.deliver(batch((2, (2,), Flag.STOP)))
    assert set(await receiver.next()) == {1, 2}
