"""The body of a request, within bounds, and answers in OpenAI's error shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve_app.protocol.bodies import LARGE, parse_object
from serve_app.protocol.errors import ApiError
from serve_app.turnstile import Turnstile

T = TypeVar("T")
_LARGE_BODIES = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")
"""One at a time: each more would keep the event loop waiting for the interpreter as long again."""


async def read_object(
    request: Request,
    max_bytes: int,
    parse: Callable[[dict[str, Any]], T],
    turnstile: Turnstile | None = None,
) -> T:
    """What `parse` makes of the JSON object of a request, once it is its turn. A large body is
    looked at beside the event loop, whose other clients would wait for it. Raises ApiError(413 or
    400), and what `parse` raises.
    """
    raw = await _read(request, max_bytes)
    if turnstile is not None:
        await turnstile.enter()
    if len(raw) < LARGE:
        return parse(parse_object(raw))
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_LARGE_BODIES, lambda: parse(parse_object(raw)))


def error_response(error: ApiError) -> Response:
    """An ApiError as a response. ASCII only, since its message may quote anything."""
    return Response(
        json.dumps(error.body()),
        error.status,
        media_type="application/json",
        headers=error.headers(),
    )


async def _read(request: Request, max_bytes: int) -> bytes:
    """Stops reading at the limit: a huge body costs no more memory than an allowed one."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise ApiError("cancelled") from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError("request_too_large", f"The body is larger than {max_bytes >> 20} MiB")
