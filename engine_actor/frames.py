"""Plain values as frames on a loopback stream: four bytes of length, then msgpack.

Tuples stay tuples, bytes stay bytes. Knows no message.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgpack

HOST = "127.0.0.1"
KEY_BYTES = 32
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
"""Far above any batch; a length beyond it is no frame of ours."""


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """Where to connect, and the KEY_BYTES that must come first, in hex: any process of the machine
    can reach a loopback port, only those that were told the key are answered.
    """

    port: int
    key: str


def pack_frame(value: object) -> bytes:
    """One frame. Raises ValueError for what msgpack cannot carry (an integer beyond 64 bits)."""
    try:
        body: bytes = msgpack.packb(value, use_bin_type=True)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"not for the wire: {error}") from None
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def write_bytes(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Raises ConnectionResetError where the connection has ended: of that asyncio's own writer says
    nothing, and uvloop's raises RuntimeError.
    """
    if writer.is_closing():
        raise ConnectionResetError("the connection has ended")
    writer.write(data)


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next value. Raises asyncio.IncompleteReadError at the end of the stream, ValueError for
    bytes that are no frame.
    """
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return msgpack.unpackb(await reader.readexactly(length), use_list=False, raw=False)
