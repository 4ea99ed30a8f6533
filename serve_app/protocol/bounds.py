"""How many entries a parameter may hold, checked before anything looks at each of them.

Validation notes every wrong entry before it gives up: a body within the size limit could hold
millions of them and keep the event loop, and with it every other client, waiting for a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from serve_app.protocol.errors import ApiError

MAX_IDS = 1 << 20
"""Token ids in one request; far beyond every context."""
MAX_ENTRIES = 4096
"""Entries of any other list or object, those of lists and objects inside it counted as well."""

_LARGER = {"prompt": MAX_IDS, "tokens": MAX_IDS, "messages": 8 * MAX_ENTRIES}
"""A message is an object with a role, a name and parts that are objects themselves."""


PLAIN = frozenset({int, float, str, bool, type(None)})
"""What holds nothing inside."""


def most_entries(name: str, otherwise: int = MAX_ENTRIES) -> int:
    """How many entries the parameter `name` may hold."""
    return _LARGER.get(name, otherwise)


def refuse_oversized(body: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse a body whose parameter `names` hold too many entries. Raises ApiError naming the
    first; the work is bounded as well. Other parameters are not looked at.
    """
    for name in names:
        value = body.get(name)
        if isinstance(value, (list, dict)):
            most = most_entries(name)
            if _exceeds(value, most):
                raise ApiError("invalid_value", f"{name}: has more than {most} entries", name)


def _exceeds(value: list[Any] | dict[str, Any], most: int) -> bool:
    """True where value and all that is inside it have more than `most` entries."""
    pending = [value]
    left = most
    while pending:
        entries = pending.pop()
        left -= len(entries)
        if left < 0:
            return True
        inner = entries.values() if isinstance(entries, dict) else entries
        if not PLAIN.issuperset(map(type, inner)):  # in C: a prompt may be many thousand ids
            pending.extend(entry for entry in inner if isinstance(entry, (list, dict)))
    return False
