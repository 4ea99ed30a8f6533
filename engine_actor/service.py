"""The engine's async face: what an actor exposes, without Ray.

Every method may run in an event loop of its own (each Ray concurrency group has one): nothing here
belongs to a loop; hand-over to the engine's thread goes through EngineLoop's futures, and back
through Subscriber's waiters. Knows sessions and messages; knows no HTTP and no Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict, astuple, replace
from typing import Any

from engine_actor.door import INVALID
from engine_actor.engine import Engine
from engine_actor.errors import EngineRestarted
from engine_actor.events import StepEvents
from engine_actor.loop import EngineLoop, Heartbeat
from engine_actor.messages import (
    PROTOCOL_VERSION,
    Attached,
    Cancel,
    Evict,
    Limit,
    Message,
    Submit,
    decode_message,
    decode_messages,
)
from engine_actor.sessions import Rejected, Sessions
from engine_actor.status import engine_status
from engine_actor.subscribers import Tell

NO_RID = -1
"""Stands for the rid in a rejection of something that has none."""
Answer = tuple[int, Rejected, tuple[int, ...]]
"""Of a post."""
POLL_S = 0.02
LAST_WORDS_S = 1.0
"""How long a lost engine waits for its clients to read their ends."""


class EngineService:
    """Owns one engine and its thread. `on_fatal` is called on that thread, after every waiter has
    been answered; who made the service ends the process there, or once the heartbeat is fatal.
    """

    def __init__(
        self,
        engine: Engine,
        on_fatal: Callable[[BaseException], None] = lambda error: None,
        epoch: int | None = None,
    ) -> None:
        self.epoch = time.time_ns() // 1_000_000 if epoch is None else epoch
        self._engine = engine
        lease_s = engine.config.lease_s
        self._sessions = Sessions(engine.clock, lease_s)
        self._load = engine.load()
        self._on_fatal = on_fatal
        self._told = False
        self._loop = EngineLoop(engine, self._publish, self._expire, lease_s / 4, self._lost)
        self._loop.start()
        rows = engine.scheduler.limits.prefill_chunk_tokens
        self._loop.call(lambda engine: engine.runner.warm_thread(rows))

    async def attach(self, client: str, protocol: int, first_seq: int = 0) -> dict[str, Any]:
        """Begin a session; batches count from 0 again. What the client had before is cancelled,
        and posts numbered below `first_seq`, still under way from then, will not run.
        Raises ValueError on another protocol, EngineRestarted where the engine is lost.
        """
        if protocol != PROTOCOL_VERSION:
            raise ValueError(f"protocol {protocol} asked, this engine speaks {PROTOCOL_VERSION}")

        def begin(engine: Engine) -> None:
            engine.drop_client(client)
            self._sessions.open(client, first_seq)

        await _joined(self._loop.call(begin))
        return asdict(self._attached())

    async def post(self, client: str, seq: int, messages: Sequence[tuple[Any, ...]]) -> Answer:
        """Run messages in order, once per (client, seq). Returns (seq, rejected, load); a rejection
        is (rid, code), rid -1 where a malformed message has none. A post with a submit is answered
        once the engine has looked at it, any other at once. Raises EngineRestarted to a client that
        is not attached, or not any more when its messages would run, for a post that belongs to
        an earlier session, and for one that a later post has passed: run now it would be out of
        order, and its requests must not wait for an answer that never comes.
        """
        return await self.begin_post(client, seq, messages)

    def begin_post(
        self, client: str, seq: int, messages: Sequence[tuple[Any, ...]]
    ) -> Coroutine[Any, Any, Answer]:
        """As post(), whose messages are the engine's when this returns; what is returned waits for
        the answer."""
        session = self._sessions.get(client)
        if seq < session.first_seq:
            raise EngineRestarted(f"post {seq} of {client} is from an earlier session")
        decoded, malformed = decode_leniently(messages)

        def run(engine: Engine) -> Rejected:
            # Overtaken by an end of its session: nobody would hear of what it starts.
            self._sessions.require(client, session)
            return malformed + apply(engine, client, decoded)

        with session.lock:
            if seq > session.last_seq:
                session.keep(seq, self._loop.call(run))
            reply = session.replies.get(seq)
        if reply is None:
            raise EngineRestarted(f"post {seq} of {client} was passed by post {session.last_seq}")
        waits = any(isinstance(message, Submit) for message in decoded)
        return self._answer(seq, malformed, reply, waits)

    async def _answer(
        self, seq: int, malformed: Rejected, reply: Future[Rejected], waits: bool
    ) -> Answer:
        if waits or self._loop.fatal:
            return seq, await _joined(reply), astuple(self._load)
        return seq, malformed, astuple(self._load)

    async def events(
        self,
        client: str,
        epoch: int,
        from_seq: int,
        max_items: int = 5000,
        tell: Tell | None = None,
    ) -> AsyncIterator[tuple[object, ...]]:
        """Encoded StepBatches of this client from `from_seq` on; ends after max_items, to be asked
        for again. Those that `tell` takes are not among them. Raises EngineRestarted on another
        epoch, a lost session or a hole in the numbers.
        """
        if epoch != self.epoch:
            raise EngineRestarted(f"epoch {epoch} is over, this is {self.epoch}")
        async for batch in self._sessions.get(client).subscriber.read(from_seq, max_items, tell):
            yield batch

    async def status(self) -> dict[str, Any]:
        """See status.py. Answered between two steps."""
        return await _joined(
            self._loop.call(
                lambda engine: engine_status(
                    engine, self.epoch, self.heartbeat(), len(self._sessions)
                )
            )
        )

    async def metrics_text(self) -> str:
        """Prometheus text."""
        return self._engine.metrics.text()

    async def metrics_snapshot(self) -> dict[str, float]:
        """Every sample by its name with labels."""
        return self._engine.metrics.snapshot()

    async def act(self, messages: Sequence[tuple[Any, ...]]) -> int:
        """An operator's cancels and evictions, each with its owner: how many of the sequences are
        live here. The others are left alone; nothing waits for them. Raises ValueError on a
        malformed message.
        """
        decoded = decode_messages(messages)

        def run(engine: Engine) -> int:
            live = [
                message
                for message in decoded
                if isinstance(message, (Cancel, Evict))
                and engine.scheduler.get((message.owner, message.rid)) is not None
            ]
            apply(engine, "", live)
            return len(live)

        return int(await _joined(self._loop.call(run)))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await _joined(self._loop.call(lambda engine: engine.kv.reset_prefix_cache()))

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, wait for the running ones and until the clients have read their
        ends. True where that happened in time.
        """
        self._engine.draining = True
        deadline = time.monotonic() + seconds
        try:
            await asyncio.wait_for(_joined(self._loop.when_idle()), seconds)
        except TimeoutError:
            return False
        while not self._sessions.flushed():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def heartbeat(self) -> Heartbeat:
        """For the watchdog; any thread. A lost engine is fatal once its clients have heard of it:
        who reads that ends the process."""
        beat = self._loop.heartbeat()
        return beat if self._told else replace(beat, fatal=None)

    def close(self) -> None:
        """Stop the thread; what still runs ends here, readers hear EngineRestarted."""
        self._loop.stop()
        self._sessions.end_all("the engine was closed")

    def _publish(self, step: StepEvents) -> None:
        self._load = step.load
        for client in self._sessions.publish(step):
            self._engine.drop_client(client)
        self._engine.metrics.set("clients_attached", len(self._sessions))

    def _lost(self, error: BaseException) -> None:
        self._sessions.end_all("the engine is lost")
        until = time.monotonic() + LAST_WORDS_S
        while not self._sessions.flushed() and time.monotonic() < until:
            time.sleep(POLL_S)
        time.sleep(POLL_S)  # what was read is on its way
        self._told = True
        self._on_fatal(error)

    def _expire(self) -> None:
        for client in self._sessions.expire():
            self._engine.drop_client(client)
            self._engine.metrics.add("leases_expired_total")
        self._engine.metrics.set("clients_attached", len(self._sessions))

    def _attached(self) -> Attached:
        facts = self._engine.facts
        pool_tokens = facts.kv_blocks * self._engine.kv.block_tokens
        return Attached(
            engine=facts.name,
            epoch=self.epoch,
            protocol=PROTOCOL_VERSION,
            model=facts.model,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            block_tokens=self._engine.kv.block_tokens,
            kv_blocks=facts.kv_blocks,
            max_prompt_tokens=min(facts.max_model_len, pool_tokens),
            eos_token_ids=facts.eos_token_ids,
        )


def apply(engine: Engine, client: str, messages: Sequence[Message]) -> Rejected:
    """Run a client's messages on the engine. Returns the submits that were refused."""
    rejected: Rejected = []
    for message in messages:
        match message:
            case Submit():
                code = engine.submit(client, message)
                if code is not None:
                    rejected.append((message.rid, code))
            case Cancel():
                engine.cancel(client, message)
            case Evict():
                engine.evict(client, message)
            case Limit():
                code = engine.limit(message)
                if code is not None:
                    rejected.append((NO_RID, code))
    return rejected


def decode_leniently(items: Sequence[tuple[Any, ...]]) -> tuple[list[Message], Rejected]:
    """Messages, and a rejection for each malformed one: one bad message costs no neighbour."""
    decoded: list[Message] = []
    rejected: Rejected = []
    for item in items:
        try:
            decoded.append(decode_message(item))
        except ValueError:
            rid = item[1] if isinstance(item, (tuple, list)) and len(item) > 1 else NO_RID
            rejected.append((rid if isinstance(rid, int) else NO_RID, INVALID))
    return decoded, rejected


async def _joined(future: Future[Any]) -> Any:
    """Wait for a future of the engine's thread; a caller that gives up does not cancel it."""
    return await asyncio.shield(asyncio.wrap_future(future))
