"""Batches that the engine's thread gives a waiting reader itself: none twice, none lost, in order,
whatever of them the connection takes."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from engine_actor import local_socket
from engine_actor.errors import EngineRestarted
from engine_actor.events import SequenceEvent, StepEvents
from engine_actor.frames import HOST, pack_frame, read_frame
from engine_actor.subscribers import Subscriber
from tests.serve.test_socket_port import PROMPT, Bench, bench, linked, read

pytestmark = pytest.mark.anyio


def told(subscriber: Subscriber, number: int) -> None:
    assert subscriber.publish([SequenceEvent(number, (number,))], StepEvents())


async def follow(subscriber: Subscriber, count: int, tell) -> list[int]:
    return [batch[0] async for batch in subscriber.read(0, count, tell)]


async def asleep() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_who_waits_is_told_on_the_publishing_thread() -> None:
    subscriber, heard, takes = Subscriber("c"), [], itertools.cycle([True, True, False])

    def tell(batch) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        if takes_it := next(takes):
            heard.append(batch[0])
        return takes_it

    for number in range(3):
        told(subscriber, number)
    reading = asyncio.create_task(follow(subscriber, 12, tell))
    await asleep()
    for number in range(3, 12):
        await asyncio.to_thread(told, subscriber, number)
        await asleep()
        assert subscriber.flushed
    # Those before it waited, each third, and the last, behind which it ends.
    assert await reading == [0, 1, 2, 5, 8, 11]
    assert heard == [3, 4, 6, 7, 9, 10]


async def test_who_does_not_wait_reads_what_there_is() -> None:
    subscriber, heard = Subscriber("c"), []
    reader = subscriber.read(0, 100, lambda batch: heard.append(batch[0]) is None)
    told(subscriber, 0)
    assert (await anext(reader))[0] == 0
    told(subscriber, 1)  # it is at work with the first
    assert not heard
    assert (await anext(reader))[0] == 1
    waiting = asyncio.create_task(anext(reader))
    await asleep()
    told(subscriber, 2)
    told(subscriber, 3)
    assert heard == [2, 3]
    subscriber.close("the end")
    with pytest.raises(EngineRestarted, match="the end"):
        await waiting


async def test_a_reader_that_has_left_is_not_told() -> None:
    subscriber, heard = Subscriber("c"), []
    reading = asyncio.create_task(follow(subscriber, 9, lambda batch: heard.append(batch) is None))
    await asleep()
    told(subscriber, 0)
    reading.cancel()
    await asyncio.wait({reading})
    told(subscriber, 1)
    assert len(heard) == 1
    assert [batch[0] async for batch in subscriber.read(1, 1)] == [1]


class ShortSocket(socket.socket):
    """Takes a few bytes, all, or nothing in turn."""

    takes = itertools.cycle([3, 1 << 20, 0, 1, 1 << 20])

    def send(self, data: bytes) -> int:  # type: ignore[override]
        if not (most := next(self.takes)):
            raise BlockingIOError
        return super().send(data[:most])


async def test_a_full_connection_gets_the_rest_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_socket, "socket", SimpleNamespace(socket=ShortSocket))
    async with bench() as made:
        link = await linked(made)
        for length in range(1, 40, 3):
            assert await read(link, length) == made.runner.expected(PROMPT, length)
        texts = await asyncio.gather(*(read(link, 30) for _ in range(8)))
        assert texts == [made.runner.expected(PROMPT, 30)] * 8
        assert (made.around.posts, made.around.streams) == (0, 0)
        await link.stop()


async def test_most_batches_go_past_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = []
    real = local_socket._PastTheLoop.__call__

    def counted(self, batch) -> bool:
        takes.append(real(self, batch))
        return takes[-1]

    monkeypatch.setattr(local_socket._PastTheLoop, "__call__", counted)
    async with bench() as made:
        link = await linked(made)
        for _ in range(5):
            assert await read(link, 20) == made.runner.expected(PROMPT, 20)
            await asyncio.sleep(0.02)
        assert sum(takes) > len(takes) / 2
        await link.stop()


@pytest.fixture(params=["asyncio", "uvloop"])
def sockets_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of the thread that serves the socket. Ray's processes have uvloop's."""
    if request.param == "asyncio":
        yield
        return
    before = asyncio.get_event_loop_policy()
    pytest.importorskip("uvloop").install()
    yield
    asyncio.set_event_loop_policy(before)


async def batches_of(made: Bench, count: int) -> list[int]:
    """The numbers of a client's first batches as they come over the socket."""
    reader, writer = await asyncio.open_connection(HOST, made.address.port)
    writer.write(bytes.fromhex(made.address.key) + pack_frame(("events", "c", 42, 0, 100)))
    try:
        return [(await read_frame(reader))[1][0] for _ in range(count)]
    finally:
        writer.close()


async def test_what_the_loop_has_written_is_not_passed(
    sockets_loop: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop's may send it at the end of a turn only; a batch is made right behind it."""
    wait = Subscriber._get

    def made_now(self: Subscriber, waiter: object) -> object:
        batch = wait(self, waiter)  # type: ignore[arg-type]
        if batch is None and self.next_seq == 1:
            told(self, 1)
        return batch

    async with bench() as made:
        await made.around.attach("c", 1)
        told(made.service._sessions.get("c").subscriber, 0)
        monkeypatch.setattr(Subscriber, "_get", made_now)
        assert await batches_of(made, 2) == [0, 1]


async def test_nothing_comes_into_the_middle_of_a_batch(
    sockets_loop: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection takes a part of one; the next is made as soon as the loop has its rest."""
    monkeypatch.setattr(local_socket, "socket", SimpleNamespace(socket=ShortSocket))
    rest = local_socket._PastTheLoop._write_rest

    def made_now(self: local_socket._PastTheLoop, left: bytes) -> None:
        rest(self, left)
        told(subscriber, subscriber.next_seq)

    async with bench() as made:
        await made.around.attach("c", 1)
        subscriber = made.service._sessions.get("c").subscriber
        monkeypatch.setattr(local_socket._PastTheLoop, "_write_rest", made_now)
        reading = asyncio.create_task(batches_of(made, 10))
        while not reading.done():
            if subscriber._waiting:
                told(subscriber, subscriber.next_seq)
            await asyncio.sleep(0.001)
        assert await reading == list(range(10))
