"""The engine's posts and events over a loopback socket, for ingresses on the same node.

A Ray call or a stream's item costs each side about a millisecond of Python; here it is some tens of
microseconds. Ray stays the way in: it hands out the address and the key, carries everything where
this socket does not reach, and says whether the actor lives. Knows the service and no transport of
Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from typing import Any, NoReturn

from engine_actor.errors import EngineError
from engine_actor.frames import (
    HOST,
    KEY_BYTES,
    SocketAddress,
    pack_frame,
    read_frame,
    write_bytes,
)
from engine_actor.service import EngineService

log = logging.getLogger(__name__)

STARTING_S = 10.0
MOST_UNANSWERED = 16
"""Of one client that wait for their answers; it has fewer in flight."""


class _PastTheLoop:
    """Writes batches to a connection from the engine's own thread, while the connection's event
    loop has nothing to write: a loop that must wake first, and get the interpreter from that
    thread, is some tenths of a millisecond late. Ended by close(), once nobody calls it any more.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        self._is_behind = False

    def __call__(self, batch: tuple[object, ...]) -> bool:
        """See subscribers.Tell."""
        if self._is_behind or self._writer.transport.get_write_buffer_size():
            return False
        try:
            frame = pack_frame(("batch", batch))
            sent = self._socket.send(frame)
        except (OSError, ValueError):  # full, or broken: the loop waits, or finds it out
            return False
        if sent < len(frame):
            self._is_behind = True
            with suppress(RuntimeError):  # the loop has ended, and with it the connection
                self._loop.call_soon_threadsafe(self._write_rest, frame[sent:])
        return True

    def close(self) -> None:
        self._socket.close()

    def _write_rest(self, rest: bytes) -> None:
        with suppress(ConnectionError):  # whoever writes next finds it out
            write_bytes(self._writer, rest)
        self._is_behind = False


class LocalSocket:
    """Serves one EngineService from a thread of its own. Start it once."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._key = secrets.token_bytes(KEY_BYTES)
        self._port: int | None = None
        self._listening = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="engine-socket", daemon=True)

    def start(self) -> SocketAddress | None:
        """Listen. None where that is not possible here; then Ray carries all."""
        self._thread.start()
        self._listening.wait(STARTING_S)
        return None if self._port is None else SocketAddress(self._port, self._key.hex())

    def close(self) -> None:
        """Stop listening; open connections end. Idempotent."""
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # its loop has ended already
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STARTING_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError:
            log.warning("no loopback socket; events go through Ray", exc_info=True)
        finally:
            self._listening.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            try:
                await self._talk(reader, writer)
            finally:
                connections.discard(task)
                writer.close()

        server = await asyncio.start_server(accept, HOST, 0)
        self._port = server.sockets[0].getsockname()[1]
        self._listening.set()
        async with server:
            await self._stop.wait()
            server.close()
            for task in tuple(connections):
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client until it leaves. Its posts run in order and are answered in order; the next is
        read and given to the engine while the one before waits for its answer."""
        posts: asyncio.Queue[Coroutine[Any, Any, Any]] = asyncio.Queue(MOST_UNANSWERED)
        answering = asyncio.create_task(self._answer_posts(posts, writer))
        try:
            key = await reader.readexactly(KEY_BYTES)
            if not secrets.compare_digest(key, self._key):
                return
            while not answering.done():
                verb, *arguments = await read_frame(reader)
                if verb == "post":
                    await posts.put(self._begin_post(*arguments))
                elif verb == "events":
                    await self._send_events(arguments, writer)
                else:
                    raise ValueError(f"no call {verb!r}")
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except asyncio.CancelledError:
            return  # the server closes; whoever waits here sees the connection end
        except Exception:
            log.exception("a call on the loopback socket")
        finally:
            answering.cancel()
            while not posts.empty():
                posts.get_nowait().close()  # what the engine has been given, it does

    def _begin_post(self, *arguments: Any) -> Coroutine[Any, Any, Any]:
        try:
            return self._service.begin_post(*arguments)
        except EngineError as error:
            return _raised(error)

    async def _answer_posts(
        self, posts: asyncio.Queue[Coroutine[Any, Any, Any]], writer: asyncio.StreamWriter
    ) -> None:
        try:
            while True:
                post = await posts.get()
                try:
                    write_bytes(writer, pack_frame(("reply", await post)))
                except EngineError as error:
                    write_bytes(writer, pack_frame(("error", error.code, str(error))))
                await writer.drain()
        except ConnectionError:
            return
        except Exception:
            log.exception("a call on the loopback socket")
            writer.close()

    async def _send_events(self, arguments: list[Any], writer: asyncio.StreamWriter) -> None:
        tell = _PastTheLoop(writer)
        try:
            client, epoch, from_seq, max_items = arguments
            stream = self._service.events(client, epoch, from_seq, max_items, tell)
            async with aclosing(stream) as batches:  # type: ignore[type-var]
                async for batch in batches:
                    write_bytes(writer, pack_frame(("batch", batch)))
                    await writer.drain()
            write_bytes(writer, pack_frame(("end",)))
        except EngineError as error:
            write_bytes(writer, pack_frame(("error", error.code, str(error))))
        finally:
            tell.close()
        await writer.drain()


async def _raised(error: EngineError) -> NoReturn:
    raise error
