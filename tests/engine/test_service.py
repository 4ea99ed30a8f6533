"""The async face: sessions, order, replay. No Ray, no HTTP; the engine's thread is real."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from engine_actor.core.params import SamplingParams
from engine_actor.errors import EngineRestarted
from engine_actor.messages import Cancel, Evict, Flag, Submit, encode_messages
from engine_actor.service import EngineService
from engine_actor.sessions import KEPT_REPLIES
from tests.doubles.scripted_runner import HashRunner
from tests.engine.service_client import EPOCH, WAIT_S, Client, Reading, bounded, serving, submit


def test_a_client_attaches_submits_and_hears_every_token() -> None:
    runner = HashRunner()

    async def scene(service: EngineService) -> None:
        client = Client(service)
        facts = await client.attach()
        assert facts["epoch"] == EPOCH
        assert facts["protocol"] == 1
        assert facts["vocab_size"] == runner.vocab_size
        assert facts["block_tokens"] == 4
        assert await client.post(submit(1), submit(2, (8, 9))) == []
        heard = await client.read_until_end(1, 2)
        assert heard[1].tokens == runner.expected((5, 6, 7), 6)
        assert heard[2].tokens == runner.expected((8, 9), 6)
        assert heard[1].flag is heard[2].flag is Flag.LENGTH

    with serving(runner) as service:
        bounded(scene(service))


def test_each_method_may_run_in_an_event_loop_of_its_own() -> None:
    """As Ray's concurrency groups do: post in one loop, events in another."""
    runner = HashRunner()
    with serving(runner) as service:
        client = Client(service)
        bounded(client.attach())
        readings: dict[int, Reading] = {}
        reader = threading.Thread(target=lambda: readings.update(bounded(client.read_until_end(1))))
        reader.start()
        bounded(client.post(submit(1)))
        reader.join(WAIT_S)
        assert readings[1].tokens == runner.expected((5, 6, 7), 6)


def test_a_post_runs_once_however_often_it_is_sent() -> None:
    async def scene(service: EngineService) -> None:
        await service.attach("c", 1)
        wire = encode_messages([submit(1), submit(2, ())])
        first = await service.post("c", 1, wire)
        again = await asyncio.gather(*(service.post("c", 1, wire) for _ in range(5)))
        assert first[:2] == (1, [(2, "invalid")])
        assert all(reply[:2] == first[:2] for reply in again)
        await Client(service).read_until_end(1)
        assert (await service.metrics_snapshot())["requests_received_total"] == 2

    with serving() as service:
        bounded(scene(service))


def test_each_of_the_last_posts_is_answered_for_itself_when_asked_again() -> None:
    """A client whose connection ended does not know which of those in flight have run."""

    async def scene(service: EngineService) -> None:
        await service.attach("c", 1)
        wires = [encode_messages([submit(rid, ())]) for rid in range(KEPT_REPLIES + 3)]
        replies = [await service.post("c", rid, wire) for rid, wire in enumerate(wires)]
        for rid, wire in enumerate(wires):
            if rid < 3:
                with pytest.raises(EngineRestarted, match=f"post {rid} of c was passed by post"):
                    await service.post("c", rid, wire)
                continue
            assert (await service.post("c", rid, wire))[:2] == replies[rid][:2]
        received = (await service.metrics_snapshot())["requests_received_total"]
        assert received == len(wires)

    with serving() as service:
        bounded(scene(service))


def test_a_post_that_a_later_one_has_passed_is_refused_and_not_run() -> None:
    """Nobody would hear of its requests if it were answered; run now it might meet their cancels
    behind it."""

    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        await service.post("c", 4, encode_messages([submit(1)]))
        with pytest.raises(EngineRestarted, match="post 3 of c was passed by post 4"):
            await service.post("c", 3, encode_messages([submit(2)]))
        assert (await client.read_until_end(1)).keys() == {1}
        assert (await service.metrics_snapshot())["requests_received_total"] == 1

    with serving() as service:
        bounded(scene(service))


def test_bad_messages_are_refused_one_by_one() -> None:
    """B-14, B-28: unknown tags, foreign ids, empty prompts; their neighbours are served."""

    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        bias = SamplingParams(logit_bias=((99_999, 1.0),), temperature=0.0)
        good = encode_messages([submit(1), submit(2, ()), submit(3, (1, 99_999))])
        wire = [*good, *encode_messages([Submit(4, (1,), bias), submit(1)])]
        junk: list[Any] = [("frobnicate", 7), ("submit", 8), (), "x", ("cancel", "a", "b", "c")]
        _, rejected, _ = await service.post("c", 1, [*junk, *wire])
        assert sorted(rid for rid, _ in rejected) == [-1, -1, -1, 1, 2, 3, 4, 7, 8]
        assert {code for _, code in rejected} == {"invalid"}
        heard = await client.read_until_end(1)
        assert heard[1].flag is Flag.LENGTH

    with serving() as service:
        bounded(scene(service))


def test_an_operator_hears_how_many_sequences_are_here() -> None:
    """Of any client; those that are not here leave nothing that a later request could meet."""
    runner = HashRunner()

    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        wire = encode_messages([Cancel(1, "admin", "c"), Cancel(2, "admin", "c")])
        assert await service.act(wire) == 0
        gate = threading.Event()
        service._loop.call(lambda engine: gate.wait(WAIT_S))
        posted = asyncio.create_task(client.post(submit(1), submit(3)))
        while not service._loop._inbox:
            await asyncio.sleep(0)
        asked = asyncio.create_task(service.act([*wire, *encode_messages([Evict(3, owner="c")])]))
        while len(service._loop._inbox) < 2:
            await asyncio.sleep(0)
        gate.set()
        assert (await posted, await asked) == ([], 2)
        assert await client.post(submit(2)) == []
        heard = await client.read_until_end(1, 2, 3)
        flags = [heard[rid].flag for rid in (1, 2, 3)]
        assert flags == [Flag.CANCELLED, Flag.LENGTH, Flag.OOM]
        assert heard[2].tokens == runner.expected((5, 6, 7), 6)

    with serving(runner) as service:
        bounded(scene(service))


def test_a_stream_can_be_taken_up_again_without_a_loss() -> None:
    """Rotation and reconnection: from_seq gives what was sent and may never have arrived."""
    runner = HashRunner()

    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        await client.post(submit(1, max_tokens=40))
        first = [batch async for batch in client.batches(0, most=10)]
        assert [batch.seq for batch in first] == list(range(10))
        # The last five were lost on the way.
        again = [batch async for batch in client.batches(5, most=10)]
        assert again[:5] == first[5:]
        rest = await client.read_until_end(1, from_seq=15)
        tokens = [token for batch in (*first, *again[5:]) for token in batch.tokens]
        assert tokens + rest[1].tokens == runner.expected((5, 6, 7), 40)
        with pytest.raises(EngineRestarted, match="batch 3 is not among"):
            await anext(client.batches(3))

    with serving(runner) as service:
        bounded(scene(service))


def test_another_epoch_and_unknown_clients_must_attach_again() -> None:
    async def scene(service: EngineService) -> None:
        with pytest.raises(EngineRestarted, match="c is not attached"):
            await service.post("c", 1, [])
        await service.attach("c", 1)
        with pytest.raises(EngineRestarted, match="epoch 41 is over, this is 42"):
            await anext(service.events("c", EPOCH - 1, 0))
        with pytest.raises(ValueError, match="protocol 99"):
            await service.attach("c", 99)

    with serving() as service:
        bounded(scene(service))


def test_a_post_of_an_earlier_session_does_not_run() -> None:
    """It was on its way while its client attached again; nobody would read what it starts."""

    async def scene(service: EngineService) -> None:
        await service.attach("c", 1)
        await service.attach("c", 1, first_seq=3)
        with pytest.raises(EngineRestarted, match="post 2 of c is from an earlier session"):
            await service.post("c", 2, encode_messages([submit(1)]))
        await service.post("c", 4, encode_messages([submit(2)]))
        client = Client(service)
        assert (await client.read_until_end(2)).keys() == {2}

    with serving() as service:
        bounded(scene(service))


def test_attaching_again_ends_what_was_there_before() -> None:
    runner = HashRunner()

    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        await client.post(submit(1, max_tokens=3000))
        reader = asyncio.create_task(client.read_until_end(1))
        await client.attach()
        with pytest.raises(EngineRestarted, match="c has attached again"):
            await reader
        await client.post(submit(2))
        heard = await client.read_until_end(2)
        assert heard[2].tokens == runner.expected((5, 6, 7), 6)
        status = await service.status()
        assert status["queue"]["running"] == 0

    with serving(runner, kv_blocks=1000) as service:
        bounded(scene(service))


def test_a_post_that_a_new_session_has_overtaken_starts_nothing() -> None:
    """The old session's post is on its way while the client attaches again: its requests would run
    to their ends with nobody to hear them.
    """

    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        busy = threading.Event()
        service._loop.call(lambda engine: busy.wait(WAIT_S))
        attaching = asyncio.create_task(service.attach("c", 1))
        await asyncio.sleep(0)
        late = asyncio.create_task(client.post(submit(1, max_tokens=1000)))
        await asyncio.sleep(0)
        busy.set()
        await attaching
        with pytest.raises(EngineRestarted, match="another session"):
            await late
        assert service._engine.metrics.value("requests_received_total") == 0
        assert await client.post(submit(2)) == []
        assert (await client.read_until_end(2))[2].flag is Flag.LENGTH

    with serving() as service:
        bounded(scene(service))
