"""The async face: sessions, order, leases, replay. No Ray, no HTTP; the engine's thread is real."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from engine_actor.core.clock import ManualClock
from engine_actor.core.params import SamplingParams
from engine_actor.errors import EngineRestarted
from engine_actor.messages import (
    Beat,
    Cancel,
    Flag,
    Message,
    StepBatch,
    Submit,
    decode_batch,
    encode_messages,
)
from engine_actor.service import EngineService
from tests.doubles.scripted_runner import HashRunner, make_service

EPOCH = 42
WAIT_S = 20.0


@contextmanager
def serving(runner: HashRunner | None = None, **settings: Any) -> Iterator[EngineService]:
    service = make_service(runner or HashRunner(), epoch=EPOCH, **settings)
    try:
        yield service
    finally:
        service.close()


class Client:
    """One ingress, by hand."""

    def __init__(self, service: EngineService, name: str = "c") -> None:
        self.service = service
        self.name = name
        self.seq = 0

    async def attach(self) -> dict[str, Any]:
        return await self.service.attach(self.name, 1)

    async def post(self, *messages: Message) -> list[tuple[int, str]]:
        self.seq += 1
        _, rejected, load = await self.service.post(self.name, self.seq, encode_messages(messages))
        assert len(load) == 5
        return rejected

    async def batches(self, from_seq: int = 0, most: int = 5000) -> AsyncIterator[StepBatch]:
        async with aclosing(self.service.events(self.name, EPOCH, from_seq, most)) as items:
            async for item in items:
                yield decode_batch(item)

    async def read_until_end(self, *rids: int, from_seq: int = 0) -> dict[int, Reading]:
        open_ones, readings = set(rids), {rid: Reading() for rid in rids}
        async with aclosing(self.batches(from_seq)) as batches:
            async for batch in batches:
                at = 0
                for rid, count, flag in zip(batch.rids, batch.counts, batch.flags, strict=True):
                    reading = readings.setdefault(rid, Reading())
                    reading.tokens.extend(batch.tokens[at : at + count])
                    reading.flag, at = flag, at + count
                    if flag not in (Flag.RUNNING, Flag.REQUEUED):
                        open_ones.discard(rid)
                for rid, extra in batch.extra:
                    readings[rid].code = extra.error_code or readings[rid].code
                if not open_ones:
                    return readings
        raise AssertionError("the stream ended")


class Reading:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.flag = Flag.RUNNING
        self.code: str | None = None


def submit(rid: int, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 6) -> Submit:
    return Submit(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def bounded(coroutine: Any) -> Any:
    """Run with a time limit: a lost hand-over shows as a failure, not as a hang."""
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


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
        assert (await service.post("c", 0, encode_messages([submit(3)])))[:2] == (0, [])
        await Client(service).read_until_end(1)
        assert (await service.metrics_snapshot())["requests_received_total"] == 2

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


def test_a_silent_client_loses_its_lease_and_its_requests() -> None:
    """An ingress that was killed leaves nothing decoding."""
    clock, runner = ManualClock(), HashRunner()
    held, started = threading.Event(), threading.Event()

    def hold(inputs: object) -> None:
        started.set()
        held.wait(WAIT_S)

    runner.before_layers = hold

    async def scene(service: EngineService) -> None:
        silent, alive = Client(service, "silent"), Client(service, "alive")
        await silent.attach()
        await alive.attach()
        await silent.post(submit(1, max_tokens=3000))
        await asyncio.to_thread(started.wait, WAIT_S)
        clock.advance(9.0)
        await alive.post(Beat())
        clock.advance(2.0)
        await alive.post(Beat())
        held.set()
        status = await service.status()
        assert status["queue"]["running"] == 0
        assert status["kv"]["blocks_free"] == status["kv"]["blocks_total"]
        assert status["clients"] == 1
        with pytest.raises(EngineRestarted):
            await silent.post(Beat())
        assert await alive.post(submit(2)) == []
        assert (await alive.read_until_end(2))[2].flag is Flag.LENGTH

    with serving(runner, clock=clock, kv_blocks=1000, lease_s=10.0) as service:
        bounded(scene(service))


def test_a_client_that_does_not_read_is_dropped_and_holds_nobody_up() -> None:
    runner = HashRunner()

    async def scene(service: EngineService) -> None:
        deaf, other = Client(service, "deaf"), Client(service, "other")
        await deaf.attach()
        await other.attach()
        service._sessions.get("deaf").subscriber._backlog = 50
        await deaf.post(submit(1, max_tokens=3000))
        await other.post(submit(2, (1, 2), max_tokens=200))
        heard = await other.read_until_end(2)
        assert heard[2].tokens == runner.expected((1, 2), 200)
        assert (await service.status())["queue"]["running"] == 0
        with pytest.raises(EngineRestarted, match="deaf is not attached"):
            await deaf.post(Beat())

    with serving(runner, kv_blocks=1000) as service:
        bounded(scene(service))


def test_drain_refuses_new_requests_and_ends_the_running_ones() -> None:
    runner = HashRunner()

    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        await client.post(submit(1, max_tokens=50))
        reader = asyncio.create_task(client.read_until_end(1))
        drained = asyncio.create_task(service.drain(WAIT_S))
        await asyncio.sleep(0)
        assert await client.post(submit(2)) == [(2, "unavailable")]
        assert (await reader)[1].tokens == runner.expected((5, 6, 7), 50)
        assert await drained is True

    with serving(runner) as service:
        bounded(scene(service))


def test_a_drain_that_takes_too_long_says_so() -> None:
    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        await client.post(submit(1, max_tokens=3000))
        assert await service.drain(0.01) is False
        await client.post(Cancel(1))

    with serving(kv_blocks=1000) as service:
        bounded(scene(service))


def test_a_lost_device_answers_every_waiter_and_then_leaves() -> None:
    """The engine dies once: all requests end `engine_restarted`, then the process is told."""
    runner, left = HashRunner(), threading.Event()

    def lose(inputs: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        runner.before_layers = lose
        await client.post(submit(1), submit(2))
        heard = await client.read_until_end(1, 2)
        assert {heard[1].flag, heard[2].flag} == {Flag.ERROR}
        assert {heard[1].code, heard[2].code} == {"engine_restarted"}
        assert await asyncio.to_thread(left.wait, WAIT_S)
        with pytest.raises(EngineRestarted):
            await client.post(submit(3))
        with pytest.raises(EngineRestarted):
            await service.status()
        assert service.wait_flushed(WAIT_S)
        beat = service.heartbeat()
        assert beat.fatal is not None
        assert "illegal memory access" in beat.fatal

    with serving(runner, on_fatal=lambda error: left.set()) as service:
        bounded(scene(service))


def test_the_heartbeat_shows_a_step_that_hangs() -> None:
    runner, held, started = HashRunner(), threading.Event(), threading.Event()

    def hold(inputs: object) -> None:
        started.set()
        held.wait(WAIT_S)

    runner.before_layers = hold

    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        assert service.heartbeat().alive
        await client.post(submit(1))
        await asyncio.to_thread(started.wait, WAIT_S)
        first = service.heartbeat().busy_seconds
        assert service.heartbeat().busy_seconds > first > 0.0
        held.set()
        await client.read_until_end(1)

    with serving(runner) as service:
        bounded(scene(service))
        service.close()
        assert not service.heartbeat().alive
