"""One attachment to one engine: an ordered post in flight, one events stream, until either ends.

Back-to-back calls to an async actor are not run in order, so exactly one post is in flight; it
carries all that gathered meanwhile, keeps the lease alive, and its reply says what was refused.
Knows nothing of requests or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from engine_actor.errors import EngineRestarted
from engine_actor.messages import (
    Attached,
    Beat,
    Message,
    StepBatch,
    Submit,
    decode_batch,
    encode_messages,
)
from serve_app.client import EnginePort, PortInterrupted, Reply
from serve_app.demux import Demux
from serve_app.mailbox import Mailbox

ITEMS_PER_STREAM = 5000
"""An endless Ray generator leaks some bytes an item on both sides; one that ends does not."""
MAX_RETRIES = 5
RETRY_S = 0.05


class SessionLost(Exception):
    """This session is over though its port is not known to be dead: a hole in the stream that
    cannot be filled, or an engine that has said good-bye.
    """


class Owner(Protocol):
    """Who is told how the session goes."""

    def heard(self, load: tuple[Any, ...] | None) -> None:
        """The engine has answered something; its load where it said so."""
        ...

    def going_down(self) -> None:
        """The engine takes nothing more."""
        ...


@dataclass(slots=True)
class Post:
    """Messages that are on their way, or will be once the reply is awaited."""

    seq: int
    messages: list[Message]
    encoded: list[tuple[Any, ...]]
    reply: Coroutine[Any, Any, Reply]


class Session:
    """Runs until the port dies or the session is lost."""

    def __init__(
        self,
        port: EnginePort,
        client: str,
        attached: Attached,
        mailbox: Mailbox,
        demux: Demux,
        post_seqs: Iterator[int],
        beat_s: float,
        owner: Owner,
    ) -> None:
        self._port = port
        self._client = client
        self._attached = attached
        self._mailbox = mailbox
        self._demux = demux
        self._post_seqs = post_seqs
        self._beat_s = beat_s
        self._owner = owner
        self._begun: Post | None = None

    async def run(self) -> None:
        """Never returns normally. Raises PortDied, SessionLost, or what the port raised."""
        tasks = [
            asyncio.create_task(self._post_forever()),
            asyncio.create_task(self._read_forever()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if self._begun is not None:
                self._begun.reply.close()
        for task in done:
            task.result()
        raise SessionLost("a session loop ended")

    async def _post_forever(self) -> None:
        while True:
            post = await self._mailbox.take(self._beat_s, self._begin)
            _, rejected, load = await self._reply(post)
            for rid, code in rejected:
                self._demux.reject(rid, code)
            self._demux.accept([item.rid for item in post.messages if isinstance(item, Submit)])
            self._owner.heard(load)

    def _begin(self, messages: list[Message]) -> Post:
        """Called within whoever puts the first message, so what the port can do at once is done."""
        seq, encoded = next(self._post_seqs), encode_messages(messages or [Beat()])
        reply = self._port.post(self._client, seq, encoded)
        self._begun = Post(seq, messages, encoded, reply)
        return self._begun

    async def _reply(self, post: Post) -> Reply:
        """One post, asked again with the same seq while it is unknown whether it arrived."""
        self._begun = None
        for attempt in range(MAX_RETRIES):
            try:
                return await post.reply
            except PortInterrupted:
                await asyncio.sleep(RETRY_S * 2**attempt)
                post.reply = self._port.post(self._client, post.seq, post.encoded)
        post.reply.close()
        raise SessionLost("post was interrupted again and again")

    async def _read_forever(self) -> None:
        expected = 0
        failures = 0
        while True:
            before = expected
            stream = self._port.events(
                self._client, self._attached.epoch, expected, ITEMS_PER_STREAM
            )
            try:
                async with aclosing(stream) as items:  # type: ignore[type-var]
                    async for item in items:
                        batch = decode_batch(item)
                        if batch.seq > expected:
                            break  # a lost item; the engine's replay buffer may still have it
                        if batch.seq == expected:
                            expected += 1
                            self._deliver(batch)
            except PortInterrupted:
                pass
            failures = 0 if expected > before else failures + 1
            if failures > MAX_RETRIES:
                raise SessionLost(f"no batch {expected} after {failures} streams")
            if failures:
                await asyncio.sleep(RETRY_S * 2**failures)

    def _deliver(self, batch: StepBatch) -> None:
        lost = any(extra.error_code == EngineRestarted.code for _, extra in batch.extra)
        if lost:
            # First of all: whoever hears of it below may ask again at once.
            self._owner.going_down()
        self._demux.deliver(batch)
        self._owner.heard(None)
        if lost:
            raise SessionLost("the engine says that it is lost")
