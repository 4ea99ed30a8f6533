"""What the ingress needs of an engine, wherever it runs.

`EnginePort` has the async methods of `engine_actor.service.EngineService`; `LocalPort` calls one
in this process (tests, the CLI's generate), a Ray port calls an actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Reply = tuple[int, list[tuple[int, str]], tuple[Any, ...]]
"""(seq, rejected [(rid, code)], load) of one post."""


class PortDied(Exception):
    """The engine behind this port is gone; nothing it had will ever be answered."""


class PortInterrupted(Exception):
    """A call may or may not have arrived. The engine may be alive; asking again is safe."""


class EnginePort(Protocol):
    """One engine. Every method raises PortDied once the engine is gone. `carrier`: what posts and
    events go over now, in words, for operators. `most_posts`: that may be in flight now, their
    replies awaited in order; `post` may send at once, before it is awaited.
    """

    @property
    def carrier(self) -> str: ...

    @property
    def most_posts(self) -> int: ...

    async def attach(self, client: str, protocol: int, first_seq: int = 0) -> dict[str, Any]: ...

    def post(
        self, client: str, seq: int, messages: list[tuple[Any, ...]]
    ) -> Coroutine[Any, Any, Reply]: ...

    def events(
        self, client: str, epoch: int, from_seq: int, max_items: int = 5000
    ) -> AsyncIterator[tuple[Any, ...]]: ...

    async def status(self) -> dict[str, Any]: ...

    async def metrics_text(self) -> str: ...

    async def act(self, messages: list[tuple[object, ...]]) -> int: ...

    async def reset_prefix_cache(self) -> None: ...

    async def drain(self, seconds: float) -> None: ...

    def close(self) -> None: ...


class LocalPort:
    """A port to a service in this process. `kill()` makes it look like a dead actor."""

    carrier = "this process"
    most_posts = 1

    def __init__(self, service: Any) -> None:
        self._service = service
        self._death: asyncio.Future[None] | None = None
        self._dead = False

    def kill(self) -> None:
        """From now on, and in every call that is waiting, PortDied."""
        self._dead = True
        if self._death is not None and not self._death.done():
            self._death.set_result(None)

    async def attach(self, client: str, protocol: int, first_seq: int = 0) -> dict[str, Any]:
        """See EngineService.attach."""
        return await self._alive(self._service.attach(client, protocol, first_seq))

    async def post(self, client: str, seq: int, messages: list[tuple[Any, ...]]) -> Reply:
        """See EngineService.post."""
        return await self._alive(self._service.post(client, seq, messages))

    async def events(
        self, client: str, epoch: int, from_seq: int, max_items: int = 5000
    ) -> AsyncIterator[tuple[Any, ...]]:
        """See EngineService.events."""
        async with aclosing(self._service.events(client, epoch, from_seq, max_items)) as stream:
            while True:
                item = await self._alive(anext(stream, None))
                if item is None:
                    return
                yield item

    async def status(self) -> dict[str, Any]:
        """See EngineService.status."""
        return await self._alive(self._service.status())

    async def metrics_text(self) -> str:
        """See EngineService.metrics_text."""
        return await self._alive(self._service.metrics_text())

    async def act(self, messages: list[tuple[object, ...]]) -> int:
        """See EngineService.act."""
        return await self._alive(self._service.act(messages))

    async def reset_prefix_cache(self) -> None:
        """See EngineService.reset_prefix_cache."""
        await self._alive(self._service.reset_prefix_cache())

    async def drain(self, seconds: float) -> None:
        """See EngineService.drain."""
        await self._alive(self._service.drain(seconds))

    def close(self) -> None:
        """Nothing is held."""

    async def _alive(self, awaitable: Awaitable[T]) -> T:
        """The awaitable's result, or PortDied as soon as the port is killed."""
        call = asyncio.ensure_future(awaitable)
        if self._death is None:
            self._death = asyncio.get_running_loop().create_future()
        if self._dead and not self._death.done():
            self._death.set_result(None)
        try:
            waited: set[asyncio.Future[Any]] = {call, self._death}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._death.done() or not call.done():
                call.cancel()
                await asyncio.wait({call})
        if self._death.done():
            raise PortDied("killed")
        return call.result()
