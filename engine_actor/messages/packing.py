"""How single fields look on the wire: packed bytes and checked values; `down` and `up` call it.

Little-endian u32 for rids and tokens, u16 for counts, u8 for flags. Knows no message type; raises
ValueError with the field's name for anything that is not what it should be.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

_CODE = {"u8": "B", "u16": "H", "u32": "I"}
_SWAP = sys.byteorder == "big"

T = TypeVar("T")


def pack(kind: str, values: Iterable[int], name: str) -> bytes:
    """Values as packed `kind` (u8, u16 or u32). Raises ValueError where one does not fit."""
    try:
        packed = array(_CODE[kind], values)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"{name}: not all values are {kind}: {error}") from None
    if _SWAP:  # pragma: no cover - no such host in use
        packed.byteswap()
    return packed.tobytes()


def unpack(kind: str, data: object, name: str) -> tuple[int, ...]:
    """The inverse of pack. Raises ValueError where data is not bytes of whole values."""
    if not isinstance(data, bytes):
        raise ValueError(f"{name}: expected bytes, got {type(data).__name__}")
    packed = array(_CODE[kind])
    if len(data) % packed.itemsize:
        raise ValueError(f"{name}: {len(data)} bytes are no whole number of {kind}")
    packed.frombytes(data)
    if _SWAP:  # pragma: no cover - no such host in use
        packed.byteswap()
    return tuple(packed)


def expect(value: object, kind: type[T], name: str) -> T:
    """`value` if it is exactly a `kind` (a bool is no int here). Raises ValueError."""
    if type(value) is not kind:
        raise ValueError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def expect_uint(value: object, bits: int, name: str) -> int:
    """`value` if it is an int in 0..2^bits-1. Raises ValueError."""
    number = expect(value, int, name)
    if not 0 <= number < 2**bits:
        raise ValueError(f"{name}: {number} is not in 0..2^{bits}-1")
    return number


def expect_sint(value: object, bits: int, name: str) -> int:
    """`value` if it is an int of so many bits, sign included. Raises ValueError."""
    number = expect(value, int, name)
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise ValueError(f"{name}: {number} is not an integer of {bits} bits")
    return number


def expect_number(value: object, name: str) -> float:
    """`value` if it is a float, or an int (not a bool) that a float can hold. Raises ValueError."""
    if type(value) is int and abs(value) < 2**1000:
        return value
    return expect(value, float, name)


def expect_fields(value: object, count: int, name: str) -> tuple[object, ...]:
    """`value` if it is a tuple (or list) of exactly `count` entries. Raises ValueError."""
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{name}: expected a tuple, got {type(value).__name__}")
    if len(value) != count:
        raise ValueError(f"{name}: expected {count} fields, got {len(value)}")
    return tuple(value)


def expect_ints(value: object, name: str) -> tuple[int, ...]:
    """`value` if it is a tuple or list of 64-bit ints. Raises ValueError."""
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{name}: expected a tuple, got {type(value).__name__}")
    return tuple(expect_sint(entry, 64, name) for entry in value)


def expect_pairs(value: object, name: str) -> tuple[tuple[int, float], ...]:
    """`value` if it holds pairs of a 64-bit int and a number only. Raises ValueError."""
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{name}: expected a tuple, got {type(value).__name__}")
    pairs = (expect_fields(entry, 2, name) for entry in value)
    return tuple(
        (expect_sint(token, 64, name), expect_number(number, name)) for token, number in pairs
    )
