"""A scripted completion server for the tests of the bench: it sends what it is told, when told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class ScriptedClock:
    """Gives the next scripted time at each reading; `read` wakes the server for its next event."""

    times: Sequence[float]
    readings: int = 0
    read: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self) -> float:
        value = self.times[self.readings]
        self.readings += 1
        self.read.set()
        return value


def chunk(text: str, finish: str | None = None) -> dict:
    """One completion chunk."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(prompt: int, completion: int) -> dict:
    """The last chunk of a stream with include_usage."""
    return {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


class FakeServer:
    """Answers every POST with `events` (one write each), then `[DONE]` unless `cut` is set.

    With `clock`, the next event is written only after the client has stamped the last one.
    """

    def __init__(self, events, clock=None, status=200, chunked=True, cut=False):
        self.events, self.clock, self.status = events, clock, status
        self.chunked, self.cut = chunked, cut
        self.bodies: list[dict] = []
        self.open = self.most_open = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        return self

    async def __aexit__(self, *exc_info):
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        length = next(
            int(line.split(":")[1])
            for line in head.split("\r\n")
            if line.lower().startswith("content-length")
        )
        self.bodies.append(json.loads(await reader.readexactly(length)))
        kind = "Transfer-Encoding: chunked\r\n" if self.chunked else ""
        writer.write(f"HTTP/1.1 {self.status} X\r\n{kind}\r\n".encode())
        for event in self.events:
            await self._write(writer, f"data: {json.dumps(event)}\n\n".encode())
        if not self.cut:
            await self._write(writer, b"data: [DONE]\n\n")
        self.open -= 1
        writer.close()

    async def _write(self, writer, body):
        if self.clock:
            self.clock.read.clear()
        framed = f"{len(body):x}\r\n".encode() + body + b"\r\n" if self.chunked else body
        writer.write(framed)
        await writer.drain()
        if self.clock:
            await self.clock.read.wait()
