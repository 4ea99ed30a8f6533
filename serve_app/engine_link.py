"""The ingress's standing link to one engine: attach, serve, notice death, attach again.

When the engine dies every waiting request hears it at once, the link is not ready, and it tries
again with growing pauses. Request ids are never used twice, in any epoch. Knows no text, no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from engine_actor.core.clock import Clock, MonotonicClock
from engine_actor.errors import EngineError
from engine_actor.messages import (
    PROTOCOL_VERSION,
    Attached,
    Cancel,
    CancelReason,
    Load,
    Message,
    Submit,
)
from serve_app.client import EnginePort, PortDied, PortInterrupted
from serve_app.demux import Demux, Receiver
from serve_app.mailbox import Mailbox
from serve_app.protocol.errors import ApiError
from serve_app.session import Session, SessionLost

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_RID = 2**32 - 1


class EngineLink:
    """One engine as the ingress sees it.

    beat_s: longest silence between posts (the lease). stale_s: an engine that has answered nothing
    for so long is not ready. first_pause_s, longest_pause_s: between attempts to attach.
    """

    def __init__(
        self,
        port_factory: Callable[[], Awaitable[EnginePort]],
        *,
        client: str | None = None,
        clock: Clock | None = None,
        beat_s: float = 0.5,
        stale_s: float = 5.0,
        first_pause_s: float = 0.05,
        longest_pause_s: float = 1.0,
    ) -> None:
        self.client = client or secrets.token_hex(5)
        self.attached: Attached | None = None
        self.load = Load()
        self.draining = False
        self.restarts = 0
        self._port_factory = port_factory
        self._port: EnginePort | None = None
        self._clock = clock or MonotonicClock()
        self._beat_s = beat_s
        self._stale_s = stale_s
        self._pauses = (first_pause_s, longest_pause_s)
        self._mailbox = Mailbox()
        self._demux = Demux(self._overflowed)
        self._post_seqs = itertools.count(1)
        self._next_rid = 1
        self._heard_at = 0.0
        self._up = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    # -- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to attach, in the running loop. Idempotent."""
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End the link; whoever waits hears `unavailable`."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait({self._runner})
            self._runner = None
        self._lost("unavailable")

    @property
    def ready(self) -> bool:
        """True where a request would be taken now."""
        return self._up.is_set() and not self.draining and self.silent_s < self._stale_s

    @property
    def carrier(self) -> str | None:
        """What posts and events go over; None while there is no engine."""
        return None if self._port is None else self._port.carrier

    @property
    def silent_s(self) -> float:
        """Seconds since the engine last answered anything."""
        return self._clock.now() - self._heard_at

    async def wait_ready(self, at_most_s: float) -> bool:
        """Wait until attached. False where that did not happen in time."""
        if not self._up.is_set() and at_most_s > 0:
            try:
                await asyncio.wait_for(self._up.wait(), at_most_s)
            except TimeoutError:
                return False
        return self._up.is_set()

    # -- requests ---------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Sequences in the engine for this ingress."""
        return self._demux.live

    def submit(self, count: int, submits: Callable[[int], list[Submit]], capacity: int) -> Receiver:
        """Send `count` sequences; `submits(first_rid)` makes their messages.

        Raises ApiError(unavailable) where there is no engine.
        """
        if not self._up.is_set() or self.draining:
            raise ApiError("unavailable")
        receiver = Receiver(self.reserve(count), capacity)
        self._demux.open(receiver)
        self._mailbox.put(*submits(receiver.rids.start))
        return receiver

    def reserve(self, count: int) -> range:
        """Consecutive request ids that were never used before."""
        if self._next_rid + count > MAX_RID:
            self._next_rid = 1
        first = self._next_rid
        self._next_rid += count
        return range(first, first + count)

    def cancel(self, rids: Iterable[int], reason: CancelReason) -> None:
        """End sequences of this ingress; those the engine has not heard of are just withdrawn."""
        for rid in rids:
            if self._mailbox.withdraw(rid):
                self._demux.close(rid)
            elif self._up.is_set():
                self._mailbox.put(Cancel(rid, reason))

    def forget(self, rid: int) -> None:
        """Hear no more of one sequence."""
        self._demux.close(rid)

    def close(self, receiver: Receiver) -> None:
        """The reader is gone: cancel what still runs and hear no more of it."""
        receiver.close()
        rids = self._demux.live_rids(receiver)
        self.cancel(rids, "client")
        for rid in rids:
            self._demux.close(rid)

    def cancel_own(self, rids: range) -> bool:
        """Cancel a request of this ingress by its public id. False where none of it is live."""
        live = [rid for rid in rids if self._demux.is_live(rid)]
        for rid in live:
            if self._mailbox.withdraw(rid):
                self._demux.reject(rid, "cancelled")
            else:
                self._mailbox.put(Cancel(rid, "admin"))
        return bool(live)

    def tell(self, message: Message) -> None:
        """Any message to the engine. Raises ApiError(unavailable)."""
        if not self._up.is_set():
            raise ApiError("unavailable")
        self._mailbox.put(message)

    # -- questions --------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """The engine's status(). Raises ApiError(unavailable)."""
        return await self._ask(lambda port: port.status())

    async def metrics_text(self) -> str:
        """The engine's metrics. Raises ApiError(unavailable)."""
        return await self._ask(lambda port: port.metrics_text())

    async def act(self, messages: list[tuple[object, ...]]) -> int:
        """See EngineService.act. Raises ApiError(unavailable)."""
        return await self._ask(lambda port: port.act(messages))

    async def reset_prefix_cache(self) -> None:
        """Drop the engine's cached prefixes. Raises ApiError(unavailable)."""
        await self._ask(lambda port: port.reset_prefix_cache())

    async def _ask(self, question: Callable[[EnginePort], Awaitable[T]]) -> T:
        if self._port is None:
            raise ApiError("unavailable")
        try:
            async with asyncio.timeout(self._stale_s):
                return await question(self._port)
        except (PortDied, PortInterrupted, EngineError, TimeoutError):
            raise ApiError("unavailable") from None

    # -- the supervisor ---------------------------------------------------------------------

    async def _run(self) -> None:
        pause, longest = self._pauses
        quiet = False
        while True:
            try:
                await self._serve_once()
            except (PortDied, PortInterrupted, SessionLost, EngineError) as reason:
                level = logging.DEBUG if quiet else logging.WARNING
                log.log(level, "engine link down, attaching again: %s", reason)
            except Exception:
                log.log(logging.DEBUG if quiet else logging.ERROR, "engine link", exc_info=True)
            if self._port is not None:
                pause, quiet = self._pauses[0], False
                self.restarts += 1
            else:
                quiet = True  # one line an outage, not one an attempt
            self._lost("engine_restarted")
            await asyncio.sleep(pause)
            pause = min(pause * 2, longest)

    async def _serve_once(self) -> None:
        port = await self._port_factory()
        try:
            await self._serve_on(port)
        finally:
            port.close()

    async def _serve_on(self, port: EnginePort) -> None:
        facts = await port.attach(self.client, PROTOCOL_VERSION, next(self._post_seqs))
        attached = Attached(**{**facts, "eos_token_ids": tuple(facts.get("eos_token_ids", ()))})
        self._port, self.attached = port, attached
        self.heard(None)
        self._up.set()
        session = Session(
            port, self.client, attached, self._mailbox, self._demux, self._post_seqs, self._beat_s,
            self,
        )  # fmt: skip
        await session.run()

    def _lost(self, code: str) -> None:
        self._up.clear()
        self._port = None
        self._mailbox.clear()
        self._demux.fail_all(code)

    def heard(self, load: tuple[Any, ...] | None) -> None:
        """The session: the engine has answered something."""
        self._heard_at = self._clock.now()
        if load:
            self.load = Load(*load)

    def going_down(self) -> None:
        """The session: the engine takes nothing more."""
        self._up.clear()

    def _overflowed(self, receiver: Receiver) -> None:
        """A reader too far behind loses its request; the engine never waits for a client."""
        receiver.fail("slow_client")
        self.close(receiver)
