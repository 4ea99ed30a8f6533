"""One attachment to one engine: ordered posts in flight, one events stream, until either ends.

Back-to-back calls to an async actor are not run in order, so over Ray one post is in flight, which
carries all that gathered meanwhile; over a socket there may be several. They keep the lease alive,
and their replies say what was refused. Knows nothing of requests or text.
"""

from __future__ import annotations

import asyncio
from collections import deque
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
        self._pending: deque[Post] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._in_doubt = False

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
            self._mailbox.on_put = None
            await asyncio.wait(tasks)
            for post in self._pending:
                post.reply.close()
        for task in done:
            task.result()
        raise SessionLost("a session loop ended")

    async def _post_forever(self) -> None:
        self._mailbox.on_put = self._pump
        self._pump()
        while True:
            if not self._pending and not await self._posted(self._beat_s):
                self._begin([Beat()])
            if self._failure is not None:
                raise self._failure
            post = self._pending[0]
            _, rejected, load = await self._reply(post)
            self._pending.popleft()
            for rid, code in rejected:
                self._demux.reject(rid, code)
            self._demux.accept([item.rid for item in post.messages if isinstance(item, Submit)])
            self._owner.heard(load)
            self._pump()

    def _pump(self) -> None:
        """Post what has gathered, as far as there may be one more post in flight. Called by whoever
        puts a message, whom a failure of ours does not concern."""
        if not len(self._mailbox) or len(self._pending) >= self._port.most_posts or self._in_doubt:
            return
        try:
            self._begin(self._mailbox.take())
        except Exception as error:
            self._failure = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _begin(self, messages: list[Message]) -> None:
        seq, encoded = next(self._post_seqs), encode_messages(messages)
        reply = self._port.post(self._client, seq, encoded)
        self._pending.append(Post(seq, messages, encoded, reply))

    async def _posted(self, at_most_s: float) -> bool:
        """Wait for a post. False where there was none in that time."""
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_later(at_most_s, _resolve, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None
        return bool(self._pending) or self._failure is not None

    async def _reply(self, post: Post) -> Reply:
        """One post, asked again with the same seq while it is unknown whether it arrived. Until it
        is known none is begun: one that passed it would be run in its place.
        """
        for attempt in range(MAX_RETRIES):
            try:
                reply = await post.reply
                self._in_doubt = False
                return reply
            except PortInterrupted:
                self._in_doubt = True
                await asyncio.sleep(RETRY_S * 2**attempt)
                post.reply = self._port.post(self._client, post.seq, post.encoded)
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


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
