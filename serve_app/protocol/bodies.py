"""Bytes of a request body -> a dict we can trust: finite numbers, encodable text.

json.loads alone lets NaN, Infinity and lone surrogates through (raw ones too, where it is given
bytes); each of them would come back as a 500 somewhere behind the door.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from serve_app.protocol.bounds import refuse_oversized
from serve_app.protocol.errors import ApiError, from_validation
from serve_app.protocol.fields import MAX_TIMEOUT_S
from serve_app.protocol.large_json import SteppingDecoder

LARGE = 1 << 15
"""Bytes from which a body is read in steps, to be run beside an event loop. Smaller ones are read
within a few milliseconds, whatever is in them."""
Model = TypeVar("Model", bound=BaseModel)


class _NotANumber(ValueError):
    """NaN or Infinity, which JSON does not have."""


def parse_object(raw: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises ApiError(400) naming the parameter where there is one.

    Of duplicate keys the last wins, as in every JSON reader a client may have tested with.
    """
    try:
        reader = SteppingDecoder if len(raw) >= LARGE else None
        value = json.loads(raw.decode("utf-8-sig"), cls=reader, parse_constant=_refuse_constant)
    except _NotANumber as error:
        raise ApiError("invalid_json", f"The body is not valid JSON: {error}") from None
    except json.JSONDecodeError as error:
        raise ApiError(
            "invalid_json", f"The body is not valid JSON: {error.msg} at character {error.pos}"
        ) from None
    except RecursionError:
        raise ApiError("invalid_json", "The body is nested too deeply") from None
    except UnicodeDecodeError:
        raise ApiError("invalid_json", "The body is not valid UTF-8") from None
    except ValueError:  # an integer of more digits than Python converts
        raise ApiError("invalid_json", "The body has a number that is too long") from None
    if not isinstance(value, dict):
        raise ApiError("invalid_json", "The body must be a JSON object")
    if b"\\u" in raw:
        refuse_lone_surrogates(value)
    return value


def refuse_lone_surrogates(body: Mapping[str, Any]) -> None:
    """Refuse text that no encoding can carry, naming the outermost parameter."""
    for name, value in body.items():
        if not _encodable(name):
            raise ApiError("invalid_value", "a parameter's name has a lone surrogate")
        if not _encodable_deep(value):
            raise ApiError("invalid_value", f"{name}: text has a lone surrogate", name)


def parse_model(kind: type[Model], body: Mapping[str, Any]) -> Model:
    """Validate a body as a request. Raises ApiError(400) with `param`."""
    refuse_oversized(body, kind.model_fields)
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        raise from_validation(error, kind.model_fields) from None
    except RecursionError:
        raise ApiError("invalid_value", "The body is nested too deeply") from None


def timeout_from_header(value: str | None) -> float | None:
    """Seconds of an `x-request-timeout` header. Raises ApiError(400)."""
    if value is None:
        return None
    try:
        seconds = math.nan if "_" in value else float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ApiError(
            "invalid_value",
            f"x-request-timeout: must be a number of seconds above 0, at most {MAX_TIMEOUT_S:.0f}",
        )
    return seconds


def _refuse_constant(name: str) -> NoReturn:
    raise _NotANumber(f"{name} is not a JSON number")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encodable_deep(value: Any) -> bool:
    pending = [value]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if not _encodable(item):
                return False
        elif isinstance(item, (list, dict)) and id(item) not in seen:
            seen.add(id(item))  # what a Python caller sends may hold itself
            pending.extend(item)
            if isinstance(item, dict):
                pending.extend(item.values())
    return True
