"""Public request ids. They carry their owner, so any ingress can pass a cancel on.

`cmpl-{client}-{first rid, hex}-{count, hex}`; chat ids begin with `chatcmpl`.
"""

from __future__ import annotations

import re

MAX_COUNT = 4096
_FORM = re.compile(r"(?:chat)?cmpl-([0-9A-Za-z_.]{1,64})-([0-9a-f]{1,8})-([0-9a-f]{1,8})", re.ASCII)


def format_public_id(prefix: str, client: str, rids: range) -> str:
    """The id of a request that owns `rids` of `client`."""
    return f"{prefix}-{client}-{rids.start:x}-{len(rids):x}"


def parse_public_id(text: object) -> tuple[str, range] | None:
    """(client, rids), or None for what no ingress ever gave out, of whatever type."""
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    first, count = int(match[2], 16), int(match[3], 16)
    if not 0 < count <= MAX_COUNT or first + count >= 1 << 32:
        return None
    return match[1], range(first, first + count)
