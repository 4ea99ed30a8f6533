"""Raw HTTP streams over sockets of the test's own, so that it decides when one is cut."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


@dataclass
class Stream:
    """One streamed completion. `events`: parsed SSE data, [DONE] left out."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    length: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False

    async def head(self) -> int:
        """Read the status line and the headers."""
        self.status = int((await self.reader.readline()).split()[1])
        while line := (await self.reader.readline()).strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                self.length = int(value)
        return self.status

    async def refusal(self) -> tuple[int, str]:
        """Status and error code of an answer that is no stream."""
        status = await self.head()
        body = json.loads(await self.reader.readexactly(self.length))
        await self.cut()
        return status, body["error"]["code"]

    async def next(self) -> dict[str, Any] | None:
        """The next event; None at [DONE] or where the body ends. Skips chunk sizes and comments."""
        while line := await self.reader.readline():
            text = line.decode().strip()
            if not text.startswith("data: "):
                continue
            if text == f"data: {DONE}":
                self.is_done = True
                return None
            self.events.append(json.loads(text.removeprefix("data: ")))
            return self.events[-1]
        return None

    async def rest(self) -> str:
        """Read to the end; the whole text."""
        while await self.next() is not None:
            pass
        await self.cut()
        return self.text

    async def cut(self) -> None:
        """Close the socket at once, whatever is on the way."""
        self.writer.transport.abort()
        await asyncio.sleep(0)  # the loop closes it in its next round

    @property
    def id(self) -> str:
        """The public id of the request."""
        return self.events[0]["id"]

    @property
    def text(self) -> str:
        """The text of choice 0 so far."""
        return "".join(
            choice["text"]
            for event in self.events
            for choice in event.get("choices", ())
            if choice["index"] == 0
        )

    @property
    def finish(self) -> str | None:
        """The finish reason of choice 0."""
        reasons = [
            choice["finish_reason"]
            for event in self.events
            for choice in event.get("choices", ())
            if choice["index"] == 0 and choice.get("finish_reason")
        ]
        return reasons[-1] if reasons else None

    @property
    def error(self) -> str | None:
        """The code of an error event."""
        errors = [event["error"]["code"] for event in self.events if "error" in event]
        return errors[0] if errors else None


async def open_stream(port: int, prompt: str, max_tokens: int, **fields: Any) -> Stream:
    """Send a streamed greedy completion; nothing is read yet."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0}
    payload = json.dumps({**body, "ignore_eos": True, **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(payload) + payload
    )
    return Stream(reader, writer)


async def started_stream(port: int, prompt: str, max_tokens: int, **fields: Any) -> Stream:
    """A stream whose first event is here."""
    stream = await open_stream(port, prompt, max_tokens, **fields)
    assert await stream.head() == 200
    assert await stream.next() is not None
    return stream
