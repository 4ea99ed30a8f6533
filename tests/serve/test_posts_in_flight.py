"""Posts over a socket that breaks and a way around it that stumbles: each is run once, in order."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from engine_actor.messages import Cancel
from engine_actor.service import EngineService
from serve_app.client import PortInterrupted
from serve_app.socket_port import SocketPort
from tests.serve.test_socket_port import PROMPT, Bench, CountedPort, bench, linked, read, submit

pytestmark = pytest.mark.anyio
LOOPS = [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})]
"""Ray's processes have uvloop's where that is installed."""
NOT_FOR_THE_WIRE = Cancel(2**70)
"""A post with it goes around the socket."""


class StumblingPort(CountedPort):
    """Interrupts a call before or behind its arrival, as `draw` says."""

    def __init__(self, service: EngineService, draw: random.Random, share: float) -> None:
        super().__init__(service)
        self._draw = draw
        self._share = share

    async def post(self, client, seq, messages):
        if self._draw.random() < self._share:
            raise PortInterrupted("before")
        reply = await super().post(client, seq, messages)
        if self._draw.random() < self._share:
            raise PortInterrupted("behind")
        return reply


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    if request.param[1]["use_uvloop"]:
        pytest.importorskip("uvloop")
    return request.param


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.session.RETRY_S", 0.002)


def stumbling(made: Bench, draw: random.Random, share: float) -> None:
    async def find():
        return made.address

    made.around = StumblingPort(made.service, draw, share)
    made.port = SocketPort(made.around, find)


def received(made: Bench) -> float:
    return made.service._engine.metrics.value("requests_received_total")


async def test_a_connection_that_has_ended_in_silence_is_found_out_by_the_next_post() -> None:
    async with bench() as made:
        port = made.port
        await port.attach("c", 1)
        await port.post("c", 1, [])
        assert port._posting is not None
        port._posting[1].transport.abort()
        await asyncio.sleep(0.01)
        posts = [port.post("c", rid, submit(rid)) for rid in (2, 3)]
        assert [(await post)[0] for post in posts] == [2, 3]
        assert (made.around.posts, received(made)) == (2, 2)


async def test_a_stream_that_breaks_while_a_post_connects_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one gives the socket up, the other is about to say its key there."""
    open_connection = asyncio.open_connection
    async with bench() as made:
        stumbling(made, random.Random(0), 0.0)
        link = await linked(made)
        assert await read(link) == made.runner.expected(PROMPT, 6)
        made.port._posting[1].close()
        made.port._posting = None

        async def slow(*arguments: object, **named: object) -> object:
            connection = await open_connection(*arguments, **named)
            made.port._address = None
            return connection

        monkeypatch.setattr(asyncio, "open_connection", slow)
        assert await read(link) == made.runner.expected(PROMPT, 6)
        assert (link.restarts, received(made)) == (0, 2)
        await link.stop()


async def test_nothing_passes_a_post_that_is_asked_again() -> None:
    """It would be taken for a post that was run already, and its request would wait for ever."""
    async with bench() as made:
        stumbling(made, random.Random(0), 0.0)
        link = await linked(made)
        assert await read(link) == made.runner.expected(PROMPT, 6)
        interrupted, around = 0, made.around.post

        async def post(client, seq, messages):
            nonlocal interrupted
            interrupted += 1
            if interrupted == 1:
                asyncio.get_running_loop().call_later(0.001, later.set)
                raise PortInterrupted("before")
            return await around(client, seq, messages)

        later = asyncio.Event()
        made.around.post = post  # type: ignore[method-assign]
        link._mailbox.on_put, on_put = None, link._mailbox.on_put
        link.tell(NOT_FOR_THE_WIRE)
        link._mailbox.on_put = on_put
        first = asyncio.create_task(read(link))
        await later.wait()
        assert await read(link) == made.runner.expected(PROMPT, 6)
        assert await first == made.runner.expected(PROMPT, 6)
        assert (interrupted, received(made), link.restarts) == (2, 3, 0)
        await link.stop()


@pytest.mark.parametrize("seed", range(6))
async def test_each_request_is_heard_once_whatever_breaks(seed: int) -> None:
    """The socket may end at any moment, then all goes around; that may stumble as well."""
    draw = random.Random(seed)
    async with bench() as made:
        stumbling(made, draw, 0.1)
        link = await linked(made)
        breaks_at = draw.choice((None, draw.randint(0, 40)))
        reading: list[asyncio.Task[list[int]]] = []
        for at in range(40):
            if at == breaks_at and made.port._posting is not None:
                made.port._posting[1].transport.abort()
            if draw.random() < 0.15:
                link.tell(NOT_FOR_THE_WIRE)
            reading += [asyncio.create_task(read(link)) for _ in range(draw.choice((0, 1, 5)))]
            if draw.random() < 0.2 and reading:
                reading.pop(draw.randrange(len(reading))).cancel()
            await asyncio.sleep(draw.choice((0, 0, 0.001, 0.003)))
        texts = await asyncio.gather(*reading)
        assert texts == [made.runner.expected(PROMPT, 6)] * len(texts)
        assert received(made) == link._next_rid - 1, "each once, and none is lost"
        assert link.restarts == 0
        await link.stop()


async def test_who_waits_for_an_answer_keeps_its_lease() -> None:
    """Posts that wait for a long step leave no room for a beat."""
    async with bench() as made:
        made.service._sessions._lease_s = 0.2
        link = await linked(made)
        reached, go_on = threading.Event(), threading.Event()

        def hold(inputs: object) -> None:
            if not reached.is_set():
                reached.set()
                go_on.wait(20)

        made.runner.before_layers = hold
        reading = [asyncio.create_task(read(link))]
        await asyncio.to_thread(reached.wait, 20)
        reading += [asyncio.create_task(read(link)) for _ in range(3)]
        await asyncio.sleep(0.5)
        go_on.set()
        assert await asyncio.gather(*reading) == [made.runner.expected(PROMPT, 6)] * 4
        assert link.restarts == 0
        await link.stop()
