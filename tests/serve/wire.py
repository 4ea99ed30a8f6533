"""Ways to be a client: one ASGI call under full control, SSE texts taken apart, a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn


def events(text: str) -> list[Any]:
    """The `data:` payloads of an SSE text in order; "[DONE]" stays a string, comments are left
    out.
    """
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in payloads]


def chunks(text: str) -> list[Any]:
    """The chunks of a stream that ended well."""
    *found, last = events(text)
    assert last == "[DONE]"
    return found


def joined(text: str, index: int = 0) -> str:
    """All text of one streamed choice, completions or chat."""
    pieces = []
    for chunk in chunks(text):
        for choice in chunk["choices"]:
            if choice["index"] == index:
                pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(pieces)


class AsgiCall:
    """One request to an ASGI app, message by message. `take()` waits for the app's next message,
    `leave()` is the client's disconnect, `stop_reading()` makes every later send wait.
    """

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self._reads = asyncio.Event()
        self._reads.set()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 80),
            "scheme": "http",
            "root_path": "",
        }
        self.task = asyncio.get_running_loop().create_task(
            app(scope, self._incoming.get, self._send)
        )

    async def take(self) -> dict[str, Any]:
        """The app's next message."""
        async with asyncio.timeout(10):
            return await self.sent.get()

    async def take_event(self) -> Any:
        """The next body message as text."""
        message = await self.take()
        if message["type"] == "http.response.start":
            message = await self.take()
        return message["body"].decode()

    async def rest(self) -> str:
        """All further body text until the app is done."""
        async with asyncio.timeout(10):
            await self.task
        parts = []
        while not self.sent.empty():
            parts.append(self.sent.get_nowait().get("body", b"").decode())
        return "".join(parts)

    def leave(self) -> None:
        """The client closes its connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    def stop_reading(self) -> None:
        """The client's window is full: writes wait."""
        self._reads.clear()

    async def _send(self, message: dict[str, Any]) -> None:
        await self._reads.wait()
        self.sent.put_nowait(message)


@contextlib.contextmanager
def serving(app: Any) -> Iterator[int]:
    """Run an app under uvicorn in a thread, on a free port, until the block ends."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", lifespan="on", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    started = threading.Event()
    port = 0

    async def run() -> None:
        nonlocal port
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        started.set()
        await server.main_loop()
        await server.shutdown()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="uvicorn")
    thread.start()
    try:
        assert started.wait(20)
        yield port
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
