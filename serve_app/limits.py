"""The live limits, as a Python caller or `user_config` of serve_config.yaml gives them. No Ray."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from engine_actor.messages import Limit, decode_messages, encode_messages


def limit_of(given: dict[str, Any]) -> Limit:
    """Limits by name. Raises ValueError naming a key that is unknown or has no value for a limit:
    the engine, which is told in passing, would leave it out unheard.
    """
    if not isinstance(given, dict):
        raise ValueError(f"must hold limits by name (got {given!r})")
    known = {item.name for item in fields(Limit)}
    unknown = sorted(str(name) for name in set(given) - known)
    if unknown:
        names = ", ".join(sorted(known))
        raise ValueError(f"no such limit: {', '.join(unknown)}; there are {names}")
    limit = Limit(**given)
    decode_messages(encode_messages([limit]))
    return limit
