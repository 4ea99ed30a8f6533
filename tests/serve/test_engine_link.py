"""The link to an engine: order, coalescing, lease, rotation, holes, death and coming back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine_actor.core.clock import ManualClock
from engine_actor.core.params import SamplingParams
from engine_actor.messages import Beat, Cancel, Flag, Submit, decode_messages
from serve_app.client import EnginePort, LocalPort, PortDied, PortInterrupted
from serve_app.demux import Receiver
from serve_app.engine_link import EngineLink
from serve_app.protocol.errors import ApiError
from tests.serve.doubles import PieceTokenizer, ScriptedService

pytestmark = pytest.mark.anyio

TOKENIZER = PieceTokenizer()


class WatchedPort(LocalPort):
    """A port that counts posts in flight and can fail."""

    def __init__(self, service: ScriptedService) -> None:
        super().__init__(service)
        self.posts: list[list[Any]] = []
        self.seqs: list[int] = []
        self.in_flight = 0
        self.interrupt_posts = 0
        self.answered = asyncio.Event()

    async def post(self, client: str, seq: int, messages: list[tuple[Any, ...]]) -> Any:
        self.in_flight += 1
        assert self.in_flight == 1, "one post in flight"
        try:
            self.posts.append(decode_messages(messages))
            self.seqs.append(seq)
            reply = await super().post(client, seq, messages)
            if self.interrupt_posts:
                self.interrupt_posts -= 1
                raise PortInterrupted("the answer was lost")
            return reply
        finally:
            self.in_flight -= 1
            self.answered.set()


class Bench:
    """A link over watched ports, one service for all."""

    def __init__(self, **service: Any) -> None:
        script = service.pop("script", lambda submit: [120] * 400)
        self.service = ScriptedService(TOKENIZER, script, auto=service.pop("auto", True))
        for name, value in service.items():
            setattr(self.service, name, value)
        self.ports: list[WatchedPort] = []
        self.refuse: Callable[[], None] = lambda: None
        self.clock = ManualClock()
        self.link = EngineLink(self._port, clock=self.clock, beat_s=0.01, first_pause_s=0.001)

    async def _port(self) -> EnginePort:
        self.refuse()
        self.ports.append(WatchedPort(self.service))
        return self.ports[-1]

    @property
    def port(self) -> WatchedPort:
        return self.ports[-1]

    def send(self, count: int = 1, max_tokens: int = 4) -> Receiver:
        sampling = SamplingParams(max_tokens=max_tokens)
        return self.link.submit(
            count,
            lambda first: [Submit(first + i, (97,), sampling) for i in range(count)],
            capacity=1000,
        )


@asynccontextmanager
async def bench(**service: Any) -> AsyncIterator[Bench]:
    made = Bench(**service)
    made.link.start()
    assert await made.link.wait_ready(10)
    async with asyncio.timeout(20):
        yield made
    await made.link.stop()


async def read(receiver: Receiver) -> dict[int, list[int]]:
    """All tokens by rid until every sequence has ended."""
    tokens: dict[int, list[int]] = {rid: [] for rid in receiver.rids}
    left = set(receiver.rids)
    while left:
        for rid, part in (await receiver.next()).items():
            tokens[rid] += part.tokens
            if part.finished:
                left.discard(rid)
    return tokens


async def test_what_gathers_during_a_post_goes_out_in_one_in_order() -> None:
    gate = asyncio.Event()
    async with bench(post_gate=gate, auto=False) as b:
        while not b.port.posts:
            await asyncio.sleep(0)
        first, second = b.send(2), b.send()
        b.link.cancel([2], "client")
        third = b.send()
        gate.set()
        while len(b.port.posts) < 2:
            await asyncio.sleep(0)
        kinds = [(type(m).__name__, m.rid) for m in b.port.posts[1]]
        assert kinds == [("Submit", 1), ("Submit", 3), ("Submit", 4)], "2 was withdrawn"
        b.link.cancel([3], "client")
        while len(b.port.posts) < 3:
            await asyncio.sleep(0)
        assert Cancel(3, "client") in b.port.posts[2]
        assert [r.rids for r in (first, second, third)] == [range(1, 3), range(3, 4), range(4, 5)]


async def test_a_quiet_link_beats() -> None:
    async with bench() as b:
        while len(b.port.posts) < 3:
            b.port.answered.clear()
            await b.port.answered.wait()
        assert b.port.posts[:3] == [[Beat()]] * 3
        assert b.port.seqs == sorted(set(b.port.seqs))


async def test_a_lost_answer_is_asked_for_again_under_the_same_number() -> None:
    async with bench() as b:
        b.port.interrupt_posts = 2
        assert await read(b.send()) == {1: [120] * 4}
        while len(b.port.seqs) < 3:
            b.port.answered.clear()
            await b.port.answered.wait()
        assert len(set(b.port.seqs[:3])) == 1
        assert b.service.attached == 1
        assert len([m for m in b.service.received if isinstance(m, Submit)]) == 1


async def test_streams_are_rotated_without_a_loss() -> None:
    async with bench(max_items=3) as b:
        receivers = [b.send(2, max_tokens=40) for _ in range(3)]
        for receiver in receivers:
            assert all(tokens == [120] * 40 for tokens in (await read(receiver)).values())
        assert b.service.streams >= 240 // 3
        assert b.service.attached == 1


async def test_a_hole_is_filled_from_the_replay_or_ends_the_session() -> None:
    async with bench(auto=False) as b:
        receiver = b.send(max_tokens=9)
        while not b.service.running:
            await asyncio.sleep(0)
        real = b.service.events

        async def holey(client: str, epoch: int, start: int, most: int = 5000) -> Any:
            async for item in real(client, epoch, start, most):
                if start > 0 or item[0] != 1:
                    yield item

        b.service.events = holey  # type: ignore[method-assign]
        await read_one(b, receiver)
        for _ in range(8):
            b.service.tick()
        assert await read(receiver) == {1: [120] * 8}
        assert b.service.attached == 1


async def read_one(b: Bench, receiver: Receiver) -> None:
    """One tick, seen."""
    b.service.tick()
    assert (await receiver.next())[1].tokens == [120]


async def test_death_answers_every_waiter_and_the_link_comes_back() -> None:
    async with bench(auto=False) as b:
        waiting = [b.send(2, max_tokens=50), b.send(max_tokens=50)]
        while len(b.service.running) < 3:
            await asyncio.sleep(0)
        dead = b.port

        def not_yet() -> None:
            raise PortDied("no such actor")

        b.refuse = not_yet
        dead.kill()
        for receiver in waiting:
            with pytest.raises(ApiError) as caught:
                await receiver.next()
            assert caught.value.code == "engine_restarted"
        assert not b.link.ready
        assert b.link.live == 0
        with pytest.raises(ApiError) as caught:
            b.send()
        assert caught.value.code == "unavailable"
        assert not await b.link.wait_ready(0.001)
        b.refuse = lambda: None
        b.service.running.clear()
        b.service.epoch, b.service.auto = 2, True
        assert await b.link.wait_ready(10)
        later = b.send()
        assert later.rids.start > waiting[-1].rids.start, "no id is used twice"
        assert await read(later) == {later.rids.start: [120] * 4}
        assert b.link.restarts == 1
        assert b.port is not dead
        first = b.service.first_seqs[-1]
        assert max(dead.seqs) < first < min(b.port.seqs), "a late post would be known as one"


async def test_an_engine_that_answers_nothing_is_not_ready() -> None:
    async with bench() as b:
        assert b.link.ready
        b.service.post_gate = asyncio.Event()
        b.port.answered.clear()
        while b.port.in_flight == 0:
            await asyncio.sleep(0)
        b.clock.advance(6)
        assert not b.link.ready
        assert b.link.silent_s == 6
        b.service.post_gate.set()
        await b.port.answered.wait()
        while not b.link.ready:
            await asyncio.sleep(0)


async def test_rejections_come_with_the_answer() -> None:
    async with bench(queue_limit=1, auto=False) as b:
        ok, refused = b.send(), b.send(2)
        with pytest.raises(ApiError) as caught:
            await refused.next()
        assert caught.value.code == "overloaded"
        b.link.close(refused)
        b.service.auto = True
        assert b.link.live == 1
        b.service.ends[-1] = (Flag.OOM, "out_of_memory")
        b.service.tick()
        part = (await ok.next())[1]
        assert (part.flag, part.error_code) == (Flag.OOM, "out_of_memory")


async def test_stopping_answers_who_waits() -> None:
    async with bench(auto=False) as b:
        receiver = b.send()
        await b.link.stop()
        with pytest.raises(ApiError) as caught:
            await receiver.next()
        assert caught.value.code == "unavailable"
        with pytest.raises(ApiError):
            await b.link.status()


async def test_questions_to_a_dead_engine_are_unavailable() -> None:
    async with bench() as b:
        assert await b.link.status() == {"running": 0, "prefill_decode_overlap": True}
        assert "prefill_steps_total" in await b.link.metrics_text()
        await b.link.reset_prefix_cache()
        port = b.port

        def not_yet() -> None:
            raise PortDied("no such actor")

        b.refuse = not_yet
        port.kill()
        with pytest.raises(ApiError) as caught:
            await b.link.status()
        assert caught.value.code == "unavailable"
