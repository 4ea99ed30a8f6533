"""Every error a client can see: code -> (status, OpenAI-shaped body), and how others become one.

Knows no web framework. A message here is written for the client: it names parameters and numbers,
never a path, a class or a traceback of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine_actor.core.params import InvalidParam

INVALID = "invalid_request_error"
SERVER = "server_error"
UNSUPPORTED = "unsupported_parameter"


@dataclass(frozen=True, slots=True)
class Kind:
    """What one code looks like on the wire. `retry_after` in seconds, None = do not say."""

    status: int
    type: str
    message: str
    retry_after: int | None = None
    no_retry: bool = False
    """OpenAI's clients retry 408 by themselves; a deadline that passed would only pass again."""


KINDS: dict[str, Kind] = {
    "invalid_value": Kind(400, INVALID, "The request has an invalid value."),
    "invalid_type": Kind(400, INVALID, "The request has a value of the wrong type."),
    "missing_required_parameter": Kind(400, INVALID, "A required parameter is missing."),
    UNSUPPORTED: Kind(400, INVALID, "The request uses an unsupported parameter."),
    "invalid": Kind(400, INVALID, "The request has an invalid value."),
    "invalid_json": Kind(400, INVALID, "The body of the request is not valid JSON."),
    "context_length_exceeded": Kind(400, INVALID, "The prompt and max_tokens are too long."),
    "not_found": Kind(404, INVALID, "There is no such resource."),
    "model_not_found": Kind(404, INVALID, "There is no such model."),
    "request_not_found": Kind(404, INVALID, "There is no such running request."),
    "method_not_allowed": Kind(405, INVALID, "This method is not allowed here."),
    "deadline_exceeded": Kind(
        408, "timeout_error", "The request's own deadline has passed.", no_retry=True
    ),
    "request_too_large": Kind(413, INVALID, "The body of the request is too large."),
    "overloaded": Kind(429, "rate_limit_error", "The queue is full; try again.", 1),
    "cancelled": Kind(499, INVALID, "The request was cancelled.", no_retry=True),
    "internal_error": Kind(500, SERVER, "The server had an error."),
    "out_of_memory": Kind(503, SERVER, "There was not enough memory for this request.", 1),
    "unavailable": Kind(503, SERVER, "The engine is not available; try again.", 2),
    "engine_restarted": Kind(503, SERVER, "The engine was restarted under this request.", 2),
    "slow_client": Kind(499, INVALID, "The client read too slowly.", no_retry=True),
}

BEFORE_FIRST_BYTE = {"engine_restarted": "unavailable"}
"""A code that means something else to a client that has seen nothing yet."""


class ApiError(Exception):
    """An error for the client. `param` is the outermost public parameter name, or None."""

    def __init__(self, code: str, message: str | None = None, param: str | None = None) -> None:
        kind = KINDS.get(code)
        if kind is None:
            code, kind, message = "internal_error", KINDS["internal_error"], None
        self.code = code
        self.kind = kind
        self.message = message or kind.message
        self.param = param
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type[ApiError], tuple[str, str, str | None]]:
        """It crosses a process where a Python handle asked (pickle would replay args only)."""
        return ApiError, (self.code, self.message, self.param)

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.kind.status

    def headers(self) -> dict[str, str]:
        """Retry-After where waiting helps, `x-should-retry` where OpenAI's clients must not."""
        headers: dict[str, str] = {}
        if self.kind.retry_after is not None:
            headers["retry-after"] = str(self.kind.retry_after)
        if self.kind.no_retry:
            headers["x-should-retry"] = "false"
        return headers

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def before_first_byte(self) -> ApiError:
        """The same event as seen by a client that has not had a byte yet."""
        code = BEFORE_FIRST_BYTE.get(self.code)
        return self if code is None else ApiError(code)


def from_invalid_param(error: InvalidParam) -> ApiError:
    """A refused sampling parameter."""
    return ApiError("invalid_value", f"{error.name}: {error.why}", error.name)


_WRONG_TYPE = re.compile(r"_type$|_parsing$|^is_instance|^(list|dict|tuple)_")


def from_validation(error: ValidationError, public: Iterable[str]) -> ApiError:
    """The first pydantic error, under the outermost public parameter's name.

    The offending value is never repeated: it may be huge, secret, or not encodable.
    """
    first = _meant(error.errors(include_url=False, include_context=False, include_input=False))
    names = set(public)
    param = next((str(part) for part in first["loc"] if part in names), None)
    kind = first["type"]
    if kind == "missing":
        inner = str(first["loc"][-1])
        where = "" if inner == param else f" in {param}"
        return ApiError("missing_required_parameter", f"{inner} is required{where}", param)
    code = "invalid_type" if _WRONG_TYPE.search(kind) else "invalid_value"
    if kind == UNSUPPORTED:
        code = UNSUPPORTED
    why = first["msg"].removeprefix("Value error, ")
    if kind == "model_type":  # pydantic's text names our class
        why = "Input should be an object"
    return ApiError(code, f"{param}: {why}" if param else why, param)


def _meant(errors: list[ErrorDetails]) -> ErrorDetails:
    """The first error. Where a text or a list would do there is one for each, the text's first: who
    got further into the list meant that, and who sent neither hears of both.
    """
    first = errors[0]
    where = first["loc"][:-1]
    if first["loc"][-1:] != ("str",):
        return first
    as_list = next((one for one in errors[1:] if one["loc"][: len(where)] == where), first)
    if len(as_list["loc"]) == len(first["loc"]):
        return {**first, "msg": "Input should be a valid string or list"}
    return as_list
