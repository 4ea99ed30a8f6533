"""Requests ended by their public id, whichever engine they run on: the operator's hand.

Our own engine is asked first, then all others. What is answered is true: a request that nobody has
is not found, and where an engine could not be asked nothing is claimed. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from engine_actor.errors import EngineError
from engine_actor.messages import Cancel, Evict, encode_messages
from serve_app.client import EnginePort, PortDied, PortInterrupted
from serve_app.engine_link import EngineLink
from serve_app.protocol.errors import ApiError
from serve_app.public_id import parse_public_id

PATIENCE_S = 5.0

PortFactory = Callable[[], Awaitable[EnginePort]]


class Operator:
    """`others`: ports to the engines that this ingress is not attached to."""

    def __init__(self, link: EngineLink, others: Sequence[PortFactory] = ()) -> None:
        self._link = link
        self._others = tuple(others)

    async def cancel(self, public_id: str) -> None:
        """End a request. Raises ApiError(request_not_found) where none of its sequences is live,
        ApiError(unavailable) where that is not known.
        """
        owner, rids = _parsed(public_id)
        if owner == self._link.client:
            if not self._link.cancel_own(rids):
                raise ApiError("request_not_found")
            return
        await self._act([Cancel(rid, "admin", owner) for rid in rids])

    async def evict(self, public_id: str, requeue: bool) -> None:
        """Free a request's memory: it ends `oom`, or runs again from its prompt. Raises as
        cancel() does.
        """
        owner, rids = _parsed(public_id)
        await self._act([Evict(rid, "admin", requeue, owner) for rid in rids])

    async def _act(self, messages: Sequence[Cancel | Evict]) -> None:
        encoded = encode_messages(messages)
        asked = await asyncio.gather(
            self._ask(self._link.act(encoded)),
            *(self._ask(_act_once(factory, encoded)) for factory in self._others),
        )
        if not any(asked):
            raise ApiError("unavailable" if None in asked else "request_not_found")

    @staticmethod
    async def _ask(answer: Awaitable[int]) -> int | None:
        """How many sequences were live there; None where the engine does not answer."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await answer
        except (ApiError, PortDied, PortInterrupted, EngineError, TimeoutError):
            return None


async def _act_once(factory: PortFactory, encoded: list[tuple[object, ...]]) -> int:
    port = await factory()
    try:
        return await port.act(encoded)
    finally:
        port.close()


def _parsed(public_id: str) -> tuple[str, range]:
    parsed = parse_public_id(public_id)
    if parsed is None:
        raise ApiError("request_not_found")
    return parsed
