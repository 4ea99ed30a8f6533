"""A large JSON text read in short steps, between which other threads run.

json.loads keeps the interpreter from the first character to the last, seconds for 16 MB of small
things, whatever thread it runs in. Here it reads runs of numbers and single strings only, and the
reading ends where there is more than any request may hold. Same values and same errors as its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from serve_app.protocol.bounds import MAX_ENTRIES, MAX_IDS, most_entries
from serve_app.protocol.errors import ApiError

MAX_INNER = 1 << 16
"""Lists and objects in one parameter: freeing a million of them takes a tenth of a second."""
RUN = 1 << 16
"""Characters of numbers and commas that take json.loads a millisecond or two."""
_FLAT = re.compile(r'[^\[\]{}"]{0,' f"{RUN}}}")

Scan = Callable[[str, int], tuple[Any, int]]


class SteppingDecoder(json.JSONDecoder):
    """For json.loads(text, cls=...). Used for one text. Raises ApiError(400) for too many entries,
    naming the parameter of the outermost object."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._plain = json.JSONDecoder(**options)
        self._depth = self._names = self._inner = 0
        self._name = ""
        self._left = MAX_IDS
        self._scan: Scan
        self.parse_object: Any = self._object
        self.parse_array: Any = self._array
        self.scan_once = py_make_scanner(self)

    def setdefault(self, name: str, default: str) -> str:
        """What an object does with each of its names, before it reads the value."""
        if self._depth == 1:
            self._names += 1
            if self._names > MAX_ENTRIES:
                message = f"The body has more than {MAX_ENTRIES} parameters"
                raise ApiError("invalid_value", message)
            self._name = name
            self._left, self._inner = 1 + most_entries(name, MAX_IDS), 0
        return default

    def _object(self, place: tuple[str, int], strict: bool, scan: Scan, *hooks: Any) -> Any:
        self._enter(scan)
        # Names would be kept in a memo to be shared; ours only hears of them.
        found = JSONObject(place, strict, self._counted, *hooks[:2], self)
        self._depth -= 1
        return found

    def _array(self, place: tuple[str, int], scan: Scan) -> Any:
        self._enter(scan)
        left = self._left
        found = self._flat(*place)
        if found is None:
            self._left = left
            found = JSONArray(place, self._counted)
        self._depth -= 1
        return found

    def _flat(self, text: str, at: int) -> tuple[list[Any], int] | None:
        """A list of nothing but numbers and literals, in runs; None for any other, and for a broken
        one, whose error is then found the other way."""
        values: list[Any] = []
        while True:
            run = _FLAT.match(text, at)
            end = at if run is None else run.end()
            is_last = text.startswith("]", end)
            if not is_last:
                # A run that ends before its time ends at something that is not flat.
                end = text.rfind(",", at, end) if end - at == RUN else -1
                if end < 0:
                    return None
            piece = text[at:end]
            if (values or not is_last) and not piece.strip():
                return None
            try:
                found = self._plain.decode(f"[{piece}]")
            except json.JSONDecodeError:
                return None
            self._count(len(found))
            values += found
            at = end + 1
            if is_last:
                return values, at

    def _counted(self, text: str, at: int) -> tuple[Any, int]:
        self._count(1)
        return self._scan(text, at)

    def _enter(self, scan: Scan) -> None:
        self._scan = scan
        self._depth += 1
        self._inner += 1
        if self._inner > MAX_INNER:
            raise self._refused(MAX_INNER, "lists and objects")

    def _count(self, entries: int) -> None:
        self._left -= entries
        if self._left < 0:
            raise self._refused(most_entries(self._name, MAX_IDS), "entries")

    def _refused(self, most: int, what: str) -> ApiError:
        if not self._names:
            return ApiError("invalid_json", "The body must be a JSON object")
        return ApiError("invalid_value", f"{self._name}: has more than {most} {what}", self._name)
