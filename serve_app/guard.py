"""The outermost layer: request ids, request metrics, and no exception ever reaches the server.

A plain ASGI wrapper, not a BaseHTTPMiddleware, which would hide a client's disconnect and copy
every chunk through a queue.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_actor.core.metrics import Metrics
from serve_app.protocol.errors import ApiError

log = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""The status, in our metrics, of a request whose client left before there was one: nginx's."""
_PLAIN = re.compile(rb"[\x21-\x7e]{1,128}")
STATE = "deepinfer.request_id"


class Guard:
    """Wraps the API. Every answer carries `x-request-id`, the caller's own where it sent one. A
    HEAD is answered as the GET would be, without the body. adds_id: False where the server around
    puts that header in, which would then stand there twice.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, adds_id: bool = True) -> None:
        self._app = app
        self._metrics = metrics
        self._adds_id = adds_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or whatever else the server says (lifespan)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = sent if _PLAIN.fullmatch(sent) else f"req-{secrets.token_hex(8)}".encode()
        scope[STATE] = request_id.decode()
        status = 0
        is_head = scope["method"] == "HEAD"
        if is_head:
            scope = {**scope, "method": "GET"}

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._adds_id:
                    headers = message.get("headers", ())
                    message["headers"] = [*headers, (b"x-request-id", request_id)]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        begun = time.monotonic()
        self._metrics.add("http_requests_in_flight", 1)
        try:
            await self._app(scope, receive, send_marked)
        except asyncio.CancelledError:  # Serve's way to say that the client has left
            self._metrics.add("ingress_disconnects_total")
            raise
        except Exception:
            log.exception("a request failed by a fault of ours")
            if status == 0:
                await _internal_error(send_marked)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.add("http_requests_in_flight", -1)
            self._metrics.add("http_requests_total", 1, route, str(status or CLIENT_LEFT))
            self._metrics.observe("http_request_seconds", time.monotonic() - begun, route)


async def _internal_error(send: Send) -> None:
    body = json.dumps(ApiError("internal_error").body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})
