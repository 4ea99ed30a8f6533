"""One streamed completion over a raw socket, with the time of every event.

A small HTTP/1.1 client of our own: a bench must not measure its client library. Knows the wire
(chunked bodies, SSE, OpenAI chunks); knows nothing of statistics.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

Clock = Callable[[], float]
READ_BYTES = 65536


@dataclass
class StreamRecord:
    """What one request did. Times are the clock's seconds. `event_times`: one per event that
    carried text; `tokens`: from the usage block, else one per such event. `error`: one line.
    """

    sent: float
    event_times: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    finish: str | None = None
    error: str | None = None


class BodyDecoder:
    """Body bytes from raw socket bytes, in any split; chunked or until the connection closes."""

    def __init__(self, chunked: bool) -> None:
        self._chunked = chunked
        self._buffer = b""
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """The body bytes that `data` completes."""
        if not self._chunked:
            return data
        self._buffer += data
        out = bytearray()
        while self._step(out):
            pass
        return bytes(out)

    def _step(self, out: bytearray) -> bool:
        """Take one piece off the buffer; False when more bytes are needed."""
        if self._left:
            piece = self._buffer[: self._left]
            self._buffer = self._buffer[len(piece) :]
            self._left -= len(piece)
            # The line end after a chunk counts as two of its bytes, which are not body.
            body = piece[: max(0, len(piece) - max(0, 2 - self._left))]
            out += body
            return bool(piece)
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        self._buffer = rest
        size = int(line.split(b";")[0], 16) if line else 0
        self._left = size + 2 if size else 0
        return bool(size)


class EventDecoder:
    """SSE `data:` payloads from body bytes, in any split. Comments and other fields are dropped."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[str]:
        """The payloads of all events that `data` completes."""
        self._buffer = (self._buffer + data).replace(b"\r\n", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        return [payload for event in events if (payload := _payload(event)) is not None]


def _payload(event: bytes) -> str | None:
    lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).decode() if lines else None


async def stream_completion(
    url: str, body: Mapping[str, Any], clock: Clock, api_key: str | None = None
) -> StreamRecord:
    """POST `body` to `url` and read the stream to its end. Failures are told in the record."""
    return await stream_request(url, request_bytes(url, body, api_key), clock)


async def stream_request(url: str, request: bytes, clock: Clock) -> StreamRecord:
    """The same for what request_bytes() made: where many are sent at once, the last ones must not
    wait for the client to write down those before them."""
    record = StreamRecord(sent=clock())
    try:
        reader, writer = await _connect(url)
        try:
            writer.write(request)
            await writer.drain()
            status, chunked = await _read_head(reader)
            if status != 200:
                text = BodyDecoder(chunked).feed(await reader.read())
                record.error = f"HTTP {status}: {text.decode(errors='replace')[:200]}"
            else:
                await _read_events(reader, BodyDecoder(chunked), record, clock)
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
    return record


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    return await asyncio.open_connection(parts.hostname, port, ssl=context)


def request_bytes(url: str, body: Mapping[str, Any], api_key: str | None = None) -> bytes:
    """A whole request that POSTs `body` to `url`."""
    parts = urlsplit(url)
    payload = json.dumps(body).encode()
    lines = [
        f"POST {parts.path or '/'} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Connection: close",
        f"Content-Length: {len(payload)}",
        *([f"Authorization: Bearer {api_key}"] if api_key else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status and whether the body is chunked."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = int(head.split(" ", 2)[1])
    return status, "transfer-encoding: chunked" in head


async def _read_events(
    reader: asyncio.StreamReader, body: BodyDecoder, record: StreamRecord, clock: Clock
) -> None:
    events = EventDecoder()
    while data := await reader.read(READ_BYTES):
        now = clock()
        for payload in events.feed(body.feed(data)):
            if payload == "[DONE]":
                return
            _take(json.loads(payload), record, now)
    record.error = record.error or "the stream ended without [DONE]"


def _take(chunk: Mapping[str, Any], record: StreamRecord, now: float) -> None:
    """Fold one OpenAI chunk (completion or chat) into the record."""
    if error := chunk.get("error"):
        record.error = str(error.get("message", error))
    if usage := chunk.get("usage"):
        record.tokens = usage["completion_tokens"]
        record.prompt_tokens = usage["prompt_tokens"]
    for choice in chunk.get("choices", ()):
        text = choice.get("text") or choice.get("delta", {}).get("content")
        record.finish = choice.get("finish_reason") or record.finish
        if text:
            record.event_times.append(now)
            record.tokens = max(record.tokens, len(record.event_times))
