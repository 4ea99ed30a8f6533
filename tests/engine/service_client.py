"""One ingress, by hand: posts, reads, and gives up after a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from engine_actor.core.params import SamplingParams
from engine_actor.messages import Flag, Message, StepBatch, Submit, decode_batch, encode_messages
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
