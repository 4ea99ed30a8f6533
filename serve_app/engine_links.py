"""All engines of an ingress behind one face: its own one first, the others where that one is away.

Requests are spread over the ingresses already, so each sends its own to one engine. When that one
dies, an ingress that only refused would be the idlest of all, and the next requests would all come
to it: it serves them on another engine instead until its own is back. Knows no request and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress

from engine_actor.messages import Cancel, Evict, Message, encode_messages
from serve_app.engine_link import EngineLink
from serve_app.protocol.errors import ApiError
from serve_app.public_id import parse_public_id


class EngineLinks:
    """`home`: the engine this ingress is for. `others`: the same model, to be used in its place."""

    def __init__(self, home: EngineLink, others: Sequence[EngineLink] = ()) -> None:
        self.home = home
        self.all = (home, *others)

    def start(self) -> None:
        """Begin to attach everywhere, in the running loop. Idempotent."""
        for link in self.all:
            link.start()

    async def stop(self) -> None:
        """End all links; whoever waits hears `unavailable`."""
        await asyncio.gather(*(link.stop() for link in self.all))

    def pick(self) -> EngineLink:
        """Where the next request goes: home, or while that is not ready the least busy that is."""
        ready = [link for link in self.all[1:] if link.ready]
        if self.home.ready or not ready:
            return self.home
        return min(ready, key=lambda link: (link.load.running + link.load.waiting, link.live))

    @property
    def live(self) -> int:
        """Sequences in any engine for this ingress."""
        return sum(link.live for link in self.all)

    @property
    def restarts(self) -> int:
        """Attachments lost since the start."""
        return sum(link.restarts for link in self.all)

    @property
    def draining(self) -> bool:
        """True once this ingress takes nothing more."""
        return self.home.draining

    def drain(self) -> None:
        """Take nothing more."""
        for link in self.all:
            link.draining = True

    def tell(self, message: Message) -> None:
        """Any message, to every engine that is there. Raises ApiError(unavailable) without one."""
        told = 0
        for link in self.all:
            with suppress(ApiError):
                link.tell(message)
                told += 1
        if not told:
            raise ApiError("unavailable")

    async def cancel(self, public_id: str) -> None:
        """End a request of any ingress on any engine. Raises ApiError(request_not_found) where none
        of it is live, ApiError(unavailable) where an engine that may have it does not answer.
        """
        owner, rids = _parsed(public_id)
        for link in self.all:
            if link.client == owner:
                if not link.cancel_own(rids):
                    raise ApiError("request_not_found")
                return
        await self._act([Cancel(rid, "admin", owner) for rid in rids])

    async def evict(self, public_id: str, requeue: bool) -> None:
        """Free a request's memory: it ends `oom`, or runs again from its prompt. Raises as cancel()
        does.
        """
        owner, rids = _parsed(public_id)
        await self._act([Evict(rid, "admin", requeue, owner) for rid in rids])

    async def _act(self, messages: Sequence[Cancel | Evict]) -> None:
        encoded = encode_messages(messages)
        found = await asyncio.gather(*(_known(link.act(encoded)) for link in self.all))
        if not any(found):
            raise ApiError("unavailable" if None in found else "request_not_found")


def _parsed(public_id: str) -> tuple[str, range]:
    parsed = parse_public_id(public_id)
    if parsed is None:
        raise ApiError("request_not_found")
    return parsed


async def _known(answer: Awaitable[int]) -> int | None:
    """None where the engine does not answer."""
    try:
        return await answer
    except ApiError:
        return None
