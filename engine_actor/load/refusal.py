"""How a bad checkpoint is refused: one printable line that names the file, key or tensor.

Knows no format. A name out of a hostile file may hold newlines or escapes, so everything that
goes into a message passes through here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_actor.errors import CheckpointError

LONGEST_MESSAGE = 400
LARGEST_JSON_BYTES = 64 << 20


def one_line(text: str) -> str:
    """`text` without a single unprintable character, cut to LONGEST_MESSAGE characters."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return clean if len(clean) <= LONGEST_MESSAGE else clean[: LONGEST_MESSAGE - 3] + "..."


def refusal(where: str | Path, why: str) -> CheckpointError:
    """The error to raise: `where` is a path (its last part is shown), a key or a tensor."""
    name = (where.name or str(where)) if isinstance(where, Path) else where
    return CheckpointError(one_line(f"{name}: {why}"))


def parse_json_object(where: str | Path, text: bytes) -> dict[str, Any]:
    """A JSON object out of untrusted bytes; a key that comes twice is refused."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise refusal(where, f"key {key!r} comes twice")
            seen[key] = value
        return seen

    try:
        value = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise refusal(where, f"not JSON ({reason})") from None
    if b"\\ud" in text.lower() and not _is_text(value):
        raise refusal(where, "holds a lone surrogate, which is no text")
    if not isinstance(value, dict):
        raise refusal(where, f"must hold a JSON object, not {type(value).__name__}")
    return value


def _is_text(value: Any) -> bool:
    """Whether every string in it can be written; an escape may name half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file. Raises CheckpointError, also where it cannot be read."""
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON_BYTES:
            raise refusal(path, f"{size} bytes is over the limit of {LARGEST_JSON_BYTES}")
        text = path.read_bytes()
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror})") from None
    return parse_json_object(path, text)
