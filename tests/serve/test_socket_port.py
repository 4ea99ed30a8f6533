"""Posts and events over the loopback socket: the same answers, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from engine_actor.core.params import SamplingParams
from engine_actor.errors import EngineRestarted
from engine_actor.frames import HOST, SocketAddress, pack_frame, read_frame
from engine_actor.local_socket import LocalSocket
from engine_actor.messages import Flag, Submit, decode_batch, encode_messages
from engine_actor.service import EngineService
from serve_app.client import LocalPort, PortDied
from serve_app.engine_link import EngineLink
from serve_app.socket_port import MOST_POSTS, SocketPort
from tests.doubles.scripted_runner import HashRunner, make_service

pytestmark = pytest.mark.anyio

PROMPT = (5, 6, 7)


class CountedPort(LocalPort):
    """What stands for Ray: counts what did not go over the socket."""

    def __init__(self, service: EngineService) -> None:
        super().__init__(service)
        self.posts = self.streams = 0

    async def post(self, client, seq, messages):
        self.posts += 1
        return await super().post(client, seq, messages)

    def events(self, client, epoch, from_seq, max_items=5000):
        self.streams += 1
        return super().events(client, epoch, from_seq, max_items)


@dataclass
class Bench:
    runner: HashRunner
    service: EngineService
    socket: LocalSocket
    around: CountedPort
    port: SocketPort
    address: SocketAddress


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    runner = HashRunner()
    service = make_service(runner, epoch=42)
    socket = LocalSocket(service)
    address = socket.start()
    assert address is not None
    around = CountedPort(service)

    async def find() -> SocketAddress:
        return address

    made = Bench(runner, service, socket, around, SocketPort(around, find), address)
    try:
        async with asyncio.timeout(20):
            yield made
    finally:
        made.port.close()
        await asyncio.to_thread(socket.close)
        service.close()


def submit(rid: int, **sampling: object) -> list[tuple]:
    settings = {"max_tokens": 6, "temperature": 0.0, **sampling}
    return encode_messages([Submit(rid, PROMPT, SamplingParams(**settings))])


async def linked(made: Bench) -> EngineLink:
    async def factory() -> SocketPort:
        return made.port

    link = EngineLink(factory, beat_s=0.05, first_pause_s=0.001)
    link.start()
    assert await link.wait_ready(10)
    return link


async def read(link: EngineLink, max_tokens: int = 6) -> list[int]:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    receiver = link.submit(1, lambda rid: [Submit(rid, PROMPT, sampling)], capacity=1000)
    tokens: list[int] = []
    while True:
        for part in (await receiver.next()).values():
            tokens += part.tokens
            if part.finished:
                return tokens


async def test_a_request_goes_over_the_socket_and_only_there() -> None:
    async with bench() as made:
        link = await linked(made)
        for _ in range(3):
            assert await read(link) == made.runner.expected(PROMPT, 6)
        assert (made.around.posts, made.around.streams) == (0, 0)
        await link.stop()


async def test_replies_and_ends_are_those_of_the_service() -> None:
    async with bench() as made:
        port = made.port
        with pytest.raises(EngineRestarted, match="c is not attached"):
            await _attached_elsewhere(port)
        await port.attach("c", 1)
        refused = [("submit", 7)]
        seq, rejected, load = await port.post("c", 1, [*submit(1), *refused])
        assert (seq, rejected, len(load)) == (1, ((7, "invalid"),), 5)
        again = await port.post("c", 1, submit(1))
        assert again[:2] == (seq, rejected), "asked twice, run once"
        batches = [item async for item in port.events("c", 42, 0, 2)]
        assert [batch[0] for batch in batches] == [0, 1]
        with pytest.raises(EngineRestarted, match="epoch 41 is over"):
            await anext(port.events("c", 41, 0))
        assert (made.around.posts, made.around.streams) == (0, 0)


async def _attached_elsewhere(port: SocketPort) -> None:
    port._address = await port._find()
    await port.post("c", 1, [])


async def test_an_integer_that_the_wire_cannot_carry_goes_the_other_way() -> None:
    async with bench() as made:
        await made.port.attach("c", 1)
        _, rejected, _ = await made.port.post("c", 1, [("submit", 2**70)])
        assert rejected == [(2**70, "invalid")]
        assert made.around.posts == 1
        await made.port.post("c", 2, [])
        assert made.around.posts == 1, "the socket is still there"


async def test_what_goes_the_other_way_goes_alone() -> None:
    """Or one behind it might overtake it, and it would never be run."""
    async with bench() as made:
        port = made.port
        await port.attach("c", 1)
        assert port.most_posts == 1, "nothing is connected"
        await port.post("c", 1, [])
        assert port.most_posts == MOST_POSTS
        detour = port.post("c", 2, [("submit", 2**70)])
        assert port.most_posts == 1
        assert (await detour)[1] == [(2**70, "invalid")]
        assert port.most_posts == MOST_POSTS


@pytest.mark.parametrize("breaks", [False, True])
async def test_posts_in_flight_are_answered_each_for_itself(breaks: bool) -> None:
    """In order; where the connection ends, those that had run are not run again."""
    async with bench() as made:
        port = made.port
        await port.attach("c", 1)
        await port.post("c", 1, [])
        posts = [port.post("c", rid, [*submit(rid), ("submit", 100 + rid)]) for rid in range(2, 8)]
        if breaks:
            assert port._posting is not None
            port._posting[1].close()
        for rid, post in enumerate(posts, 2):
            seq, rejected, _ = await post
            assert (seq, list(rejected)) == (rid, [(100 + rid, "invalid")])
        assert made.around.posts == (len(posts) if breaks else 0)
        ended = set[int]()
        async for item in port.events("c", 42, 0):
            batch = decode_batch(item)
            ended |= {r for r, f in zip(batch.rids, batch.flags, strict=True) if f is Flag.LENGTH}
            if ended >= set(range(2, 8)):
                break
        assert made.service._engine.metrics.value("requests_received_total") == len(posts)


async def test_a_burst_is_posted_without_waiting_for_answers() -> None:
    async with bench() as made:
        link = await linked(made)
        assert await read(link) == made.runner.expected(PROMPT, 6)
        reached, go_on = threading.Event(), threading.Event()

        def hold(inputs: object) -> None:
            reached.set()
            go_on.wait(20)

        made.runner.before_layers = hold
        first = asyncio.create_task(read(link))
        await asyncio.to_thread(reached.wait, 20)
        others = [asyncio.create_task(read(link)) for _ in range(3)]
        await asyncio.sleep(0)
        assert made.port._posting is not None
        for _ in range(200):
            if len(made.service._loop._inbox) == len(others):
                break
            await asyncio.sleep(0.01)
        assert len(link._mailbox) == 0
        assert len(made.service._loop._inbox) == len(others), "each post, though none is answered"
        go_on.set()
        for task in (first, *others):
            assert await task == made.runner.expected(PROMPT, 6)
        await link.stop()


async def test_a_broken_socket_loses_nothing() -> None:
    """The stream goes on where it was, through the port around."""
    async with bench() as made:
        link = await linked(made)
        reached, go_on, steps = threading.Event(), threading.Event(), itertools.count()

        def hold(inputs: object) -> None:
            if next(steps) == 20:
                reached.set()
                go_on.wait(20)

        made.runner.before_layers = hold
        reading = asyncio.create_task(read(link, 200))
        await asyncio.to_thread(reached.wait, 20)
        await asyncio.to_thread(made.socket.close)
        go_on.set()
        assert await reading == made.runner.expected(PROMPT, 200)
        assert made.around.streams == 1
        assert await read(link) == made.runner.expected(PROMPT, 6)
        assert made.around.posts > 0
        await link.stop()


async def test_a_dead_engine_is_known_by_the_port_around() -> None:
    async with bench() as made:
        await made.port.attach("c", 1)
        await made.port.post("c", 1, [])
        await asyncio.to_thread(made.socket.close)
        made.around.kill()
        with pytest.raises(PortDied):
            await made.port.post("c", 2, [])
        with pytest.raises(PortDied):
            await anext(made.port.events("c", 42, 0))


async def test_who_does_not_know_the_key_is_not_answered() -> None:
    async with bench() as made:
        reader, writer = await asyncio.open_connection(HOST, made.address.port)
        writer.write(bytes(32) + pack_frame(("post", "c", 1, [])))
        assert await reader.read() == b""
        writer.close()


async def test_bytes_that_are_no_frame_end_that_connection_only() -> None:
    async with bench() as made:
        reader, writer = await asyncio.open_connection(HOST, made.address.port)
        writer.write(bytes.fromhex(made.address.key) + b"\xff\xff\xff\xff")
        assert await reader.read() == b""
        writer.close()
        await made.port.attach("c", 1)
        assert (await made.port.post("c", 1, []))[0] == 1


async def test_no_socket_for_us_is_no_loss() -> None:
    async with bench() as made:

        async def nowhere() -> None:
            return None

        port = SocketPort(made.around, nowhere)
        await port.attach("c", 1)
        await port.post("c", 1, submit(1))
        assert [batch[0] async for batch in port.events("c", 42, 0, 2)] == [0, 1]
        assert (made.around.posts, made.around.streams) == (1, 1)


@pytest.mark.parametrize("value", [(), (1, b"\x00\xff", "é", None, (1.5, (True,))), 2**64 - 1])
async def test_values_come_back_as_they_were(value: object) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(pack_frame(value) + pack_frame("next"))
    assert [await read_frame(reader), await read_frame(reader)] == [value, "next"]
