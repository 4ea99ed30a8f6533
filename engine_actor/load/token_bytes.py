"""The bytes that one token stands for, as a decoder of its kind would give them inside a text.

Knows the two families in use: byte-level BPE, whose vocabulary spells bytes as visible characters,
and sentencepiece, which writes a space as U+2581 and has tokens like <0xE4> for single bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def decoder_kinds(decoder: Any) -> frozenset[str]:
    """Type names in the `decoder` part of a tokenizer.json, sequences opened up."""
    return frozenset(_kinds(decoder))


def _kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or ():
            yield from _kinds(part)


def piece_bytes(piece: str, kinds: frozenset[str]) -> bytes | None:
    """Bytes of a vocabulary entry (not of an added token, which is literal text); None where this
    decoder is of a kind we do not know.
    """
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()
        if all(letter in alphabet for letter in piece):
            return bytes(alphabet[letter] for letter in piece)
        return piece.encode()
    if kinds & {"ByteFallback", "Metaspace"}:
        if "ByteFallback" in kinds and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE, " ").encode()
    return None


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling: printable Latin-1 bytes are themselves, the others follow from U+0100."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(256) if byte not in visible)
    letters.update((chr(0x100 + index), byte) for index, byte in enumerate(hidden))
    return letters
