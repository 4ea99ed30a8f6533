"""The engine's posts and events over a loopback socket, for ingresses on the same node.

A Ray call or a stream's item costs each side about a millisecond of Python; here it is some tens of
microseconds. Ray stays the way in: it hands out the address and the key, carries everything where
this socket does not reach, and says whether the actor lives. Knows the service and no transport of
Ray.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from contextlib import aclosing, suppress
from typing import Any

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
        posts: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue(MOST_UNANSWERED)
        answering = asyncio.create_task(self._answer_posts(posts, writer))
        try:
            key = await reader.readexactly(KEY_BYTES)
            if not secrets.compare_digest(key, self._key):
                return
            while not answering.done():
                verb, *arguments = await read_frame(reader)
                if verb == "post":
                    await posts.put(asyncio.create_task(self._service.post(*arguments)))
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
                posts.get_nowait().cancel()  # what the engine has been given, it does

    async def _answer_posts(
        self, posts: asyncio.Queue[asyncio.Task[Any]], writer: asyncio.StreamWriter
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
        try:
            async with aclosing(self._service.events(*arguments)) as batches:  # type: ignore[type-var]
                async for batch in batches:
                    write_bytes(writer, pack_frame(("batch", batch)))
                    await writer.drain()
            write_bytes(writer, pack_frame(("end",)))
        except EngineError as error:
            write_bytes(writer, pack_frame(("error", error.code, str(error))))
        await writer.drain()
