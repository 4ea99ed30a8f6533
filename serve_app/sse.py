"""Our own ASGI responses: a stream of server-sent events, or one JSON body, of one generation.

`http.response.start` goes out only with the first event, so a 4xx, 429 or 503 stays possible until
the engine has really begun. The one exception is the keep-alive: a request that has waited
`keep_alive_s` gets a 200 and a comment, so that no proxy in between cuts it; from then on an error
is an SSE error object. Every write has a time limit: a client that does not read is cut, and the
engine never waits for one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from configs.schema import HttpConfig
from engine_actor.core.metrics import Metrics
from serve_app.disconnect import run_until_disconnect
from serve_app.generation import Generation
from serve_app.protocol.errors import ApiError
from serve_app.protocol.shapes import DONE, KEEP_ALIVE, ChoiceDelta, Shape, error_event
from serve_app.slow_client import BoundedSend, SlowClient

log = logging.getLogger(__name__)

Begin = Callable[[], tuple[Generation, Shape]]
"""Submits the request; called when the response runs, so nothing is submitted that nobody reads."""


class GenerationResponse(Response):
    """Answers one request whose body has been read. A Response only so that FastAPI lets it be."""

    def __init__(
        self,
        begin: Begin,
        stream: bool,
        http: HttpConfig,
        metrics: Metrics,
        headers: Mapping[str, str],
    ) -> None:
        self.background = None
        self._begin = begin
        self._stream = stream
        self._http = http
        self._metrics = metrics
        self._extra = headers
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. A client that leaves early ends every sequence of its request."""
        try:
            # Before there is a task to wait for: in a burst it would wait for all other requests.
            begun = self._begin_or_error()
            try:
                if await run_until_disconnect(receive, self._answer(begun, send)):
                    self._metrics.add("ingress_disconnects_total")
            finally:
                if not isinstance(begun, Exception):
                    begun[0].close()
        except SlowClient:
            self._metrics.add("ingress_slow_clients_total")

    def _begin_or_error(self) -> tuple[Generation, Shape] | Exception:
        try:
            return self._begin()
        except Exception as error:
            return error

    async def _answer(self, begun: tuple[Generation, Shape] | Exception, unbounded: Send) -> None:
        with BoundedSend(unbounded, self._http.slow_client_s) as send:
            try:
                if isinstance(begun, Exception):
                    raise begun
                if self._stream:
                    await self._events(*begun, send)
                else:
                    await self._whole(*begun, send)
            except ApiError as error:
                await self._fail(error, send)
            except (SlowClient, OSError):
                raise
            except Exception:
                log.exception("a request failed by a fault of ours")
                await self._fail(ApiError("internal_error"), send)

    async def _events(self, generation: Generation, shape: Shape, send: Send) -> None:
        job = generation.job
        begun = time.monotonic()
        first = True
        async with aclosing(generation.deltas(self._http.keep_alive_s)) as batches:
            async for deltas in batches:
                chunk = self._chunk(generation, shape, deltas, first) if deltas else KEEP_ALIVE
                if first and deltas:
                    first = False
                    self._metrics.observe("http_first_event_seconds", time.monotonic() - begun)
                await self._write(send, chunk, more=True)
        tail = shape.usage_event(generation.usage()) if job.include_usage else b""
        await self._write(send, tail + DONE, more=False)

    def _chunk(
        self, generation: Generation, shape: Shape, deltas: list[ChoiceDelta], first: bool
    ) -> bytes:
        usage = generation.usage() if generation.job.continuous_usage else None
        if len(deltas) == 1 and not first:
            return shape.event(deltas[0], usage)
        opening = shape.opening(usage) if first else b""
        return opening + b"".join([shape.event(delta, usage) for delta in deltas])

    async def _whole(self, generation: Generation, shape: Shape, send: Send) -> None:
        choices = await generation.results()
        body = json.dumps(shape.whole(choices, generation.usage()), ensure_ascii=False)
        await self._send_json(send, 200, body.encode(), {})

    async def _fail(self, error: ApiError, send: Send) -> None:
        if self._started:
            await self._write(send, error_event(error.body()) + DONE, more=False)
            return
        error = error.before_first_byte()
        body = json.dumps(error.body()).encode()
        await self._send_json(send, error.status, body, error.headers())

    async def _write(self, send: Send, body: bytes, more: bool) -> None:
        """One piece of the stream, behind the start if that has not gone out."""
        if not self._started:
            self._started = True
            await send(self._start(200, "text/event-stream; charset=utf-8", _STREAM, None))
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _send_json(
        self, send: Send, status: int, body: bytes, headers: Mapping[str, str]
    ) -> None:
        self._started = True
        await send(self._start(status, "application/json", headers, len(body)))
        await send({"type": "http.response.body", "body": body})

    def _start(
        self, status: int, media: str, headers: Mapping[str, str], length: int | None
    ) -> dict[str, object]:
        lines = {"content-type": media, **self._extra, **headers}
        if length is not None:
            lines["content-length"] = str(length)
        return {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in lines.items()],
        }


_STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Proxies that gather a response before passing it on are told not to."""
