"""Clients that fall silent or do not read, drains, lost devices, hung steps."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine_actor.core.clock import ManualClock
from engine_actor.errors import EngineRestarted
from engine_actor.messages import Beat, Cancel, Flag
from engine_actor.service import EngineService
from tests.doubles.scripted_runner import HashRunner
from tests.engine.service_client import WAIT_S, Client, bounded, serving, submit


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
        with pytest.raises(EngineRestarted, match="the engine is lost"):
            [batch async for batch in client.batches(1)]
        beat = service.heartbeat()
        assert beat.fatal is not None
        assert "illegal memory access" in beat.fatal

    with serving(runner, on_fatal=lambda error: left.set()) as service:
        bounded(scene(service))


def test_a_lost_engine_is_not_fatal_before_its_clients_have_heard_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reads the heartbeat ends the process."""
    monkeypatch.setattr("engine_actor.service.LAST_WORDS_S", 60.0)
    runner, left = HashRunner(), threading.Event()

    def lose(inputs: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def asks_for_ever(service: EngineService) -> None:
        while True:
            await service.status()

    async def scene(service: EngineService) -> None:
        client = Client(service)
        await client.attach()
        runner.before_layers = lose
        await client.post(submit(1))
        with pytest.raises(EngineRestarted):
            await asks_for_ever(service)
        assert service.heartbeat().fatal is None
        assert not left.is_set()
        heard = await client.read_until_end(1)
        assert heard[1].code == "engine_restarted"
        assert await asyncio.to_thread(left.wait, WAIT_S)
        assert service.heartbeat().fatal is not None

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
