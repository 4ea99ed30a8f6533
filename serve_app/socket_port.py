"""A port whose posts and events go over the engine's loopback socket, where it is on our node.

Around another port (Ray's), which attaches, answers questions, and takes over for good as soon as
the socket fails: it knows whether the actor lives. Knows the socket's calls and no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from engine_actor.errors import EngineRestarted
from engine_actor.frames import HOST, SocketAddress, pack_frame, read_frame, write_bytes
from serve_app.client import EnginePort, PortInterrupted, Reply

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BROKEN = (OSError, asyncio.IncompleteReadError)
"""How a connection ends that was not closed by us."""
MOST_POSTS = 8
"""In flight: in a burst the next request is not kept waiting for the answer to the one before."""


class SocketPort:
    """`find` says where the socket is, or None where there is none for us; asked once an attach."""

    def __init__(
        self, port: EnginePort, find: Callable[[], Awaitable[SocketAddress | None]]
    ) -> None:
        self._port = port
        self._find = find
        self._address: SocketAddress | None = None
        self._posting: Connection | None = None
        self._detours = 0

    @property
    def carrier(self) -> str:
        """See EnginePort."""
        return self._port.carrier if self._address is None else "loopback socket"

    @property
    def most_posts(self) -> int:
        """See EnginePort. A connection keeps their order; what takes another way goes alone."""
        if self._address is None:
            return self._port.most_posts
        return 1 if self._posting is None or self._detours else MOST_POSTS

    async def attach(self, client: str, protocol: int, first_seq: int = 0) -> dict[str, Any]:
        """See EngineService.attach."""
        facts = await self._port.attach(client, protocol, first_seq)
        self._address = await self._find()
        return facts

    def post(
        self, client: str, seq: int, messages: list[tuple[Any, ...]]
    ) -> Coroutine[Any, Any, Reply]:
        """See EngineService.post; what is connected is sent before this returns. It runs once per
        seq, so asking again another way is safe."""
        if self._address is None:
            return self._port.post(client, seq, messages)
        try:
            call = pack_frame(("post", client, seq, messages))
        except ValueError:  # an integer that msgpack cannot carry; Ray can
            self._detours += 1
            return self._detour(client, seq, messages)
        if self._posting is not None:
            with suppress(ConnectionError):  # whoever awaits the answer finds it out
                write_bytes(self._posting[1], call)
        return self._posted(self._posting, call, (client, seq, messages))

    async def _posted(
        self,
        connection: Connection | None,
        call: bytes,
        post: tuple[str, int, list[tuple[Any, ...]]],
    ) -> Reply:
        try:
            if connection is None:
                connection = self._posting = await self._connect()
                write_bytes(connection[1], call)
            reply: Reply = await self._answer(connection)
            return reply
        except BROKEN:
            self._address = None
        return await self._port.post(*post)

    async def _detour(self, client: str, seq: int, messages: list[tuple[Any, ...]]) -> Reply:
        try:
            return await self._port.post(client, seq, messages)
        finally:
            self._detours -= 1

    async def events(
        self, client: str, epoch: int, from_seq: int, max_items: int = 5000
    ) -> AsyncIterator[tuple[Any, ...]]:
        """See EngineService.events."""
        stream = self._events if self._address is not None else self._port.events
        async with aclosing(stream(client, epoch, from_seq, max_items)) as items:  # type: ignore[type-var]
            async for item in items:
                yield item

    async def status(self) -> dict[str, Any]:
        """See EngineService.status."""
        return await self._port.status()

    async def metrics_text(self) -> str:
        """See EngineService.metrics_text."""
        return await self._port.metrics_text()

    async def act(self, messages: list[tuple[object, ...]]) -> int:
        """See EngineService.act."""
        return await self._port.act(messages)

    async def reset_prefix_cache(self) -> None:
        """See EngineService.reset_prefix_cache."""
        await self._port.reset_prefix_cache()

    async def drain(self, seconds: float) -> None:
        """See EngineService.drain."""
        await self._port.drain(seconds)

    def close(self) -> None:
        """Drop the connection. Idempotent."""
        if self._posting is not None:
            self._posting[1].close()
            self._posting = None
        self._port.close()

    async def _answer(self, connection: Connection) -> Any:
        """To the oldest call on a connection, which does not survive an answer left unread."""
        try:
            return result_of(await read_frame(connection[0]))
        except EngineRestarted:
            raise
        except BaseException:
            connection[1].close()
            if self._posting is connection:
                self._posting = None
            raise

    async def _events(
        self, client: str, epoch: int, from_seq: int, max_items: int
    ) -> AsyncIterator[tuple[Any, ...]]:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await self._connect()
            write_bytes(writer, pack_frame(("events", client, epoch, from_seq, max_items)))
            while (item := result_of(await read_frame(reader))) is not None:
                yield item
        except BROKEN as error:
            self._address = None
            raise PortInterrupted(f"the loopback socket: {error!r}") from None
        finally:
            if writer is not None:
                writer.close()

    async def _connect(self) -> Connection:
        address = self._address  # given up, perhaps, while we connect
        if address is None:
            raise ConnectionError("the loopback socket is given up")
        reader, writer = await asyncio.open_connection(HOST, address.port)
        write_bytes(writer, bytes.fromhex(address.key))
        return reader, writer


def result_of(answer: tuple[Any, ...]) -> Any:
    """What an answer carries; None at the end of a stream. Raises what the engine raised."""
    match answer:
        case ("reply" | "batch", value):
            return value
        case ("end",):
            return None
        case ("error", EngineRestarted.code, str(reason)):
            raise EngineRestarted(reason)
    raise ConnectionError(f"an answer we do not know: {answer[:1]!r}")
