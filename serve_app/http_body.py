"""The body of a request, within bounds, and answers in OpenAI's error shape."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve_app.protocol.bodies import parse_object
from serve_app.protocol.errors import ApiError


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object of a request. Raises ApiError(413 or 400)."""
    return parse_object(await _read(request, max_bytes))


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
