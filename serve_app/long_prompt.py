"""Tokenising a text that may be far longer than anything that can be served: bounded work.

Knows the tokenizer's `encode` and a limit of tokens; knows no request.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_CHARACTERS_A_TOKEN = 8
"""A first look at this many characters for each token of the limit takes in nearly every text that
fits, so that such a text is encoded once."""
CERTAINTY = 2
"""A cut changes tokens only near it. A beginning of twice the limit cannot belong to a text of less
than the limit."""


class TextTooLong(Exception):
    """The text has more tokens than the limit; how many is not known."""


def encode_at_most(encode: Callable[[str], list[int]], text: str, limit: int) -> list[int]:
    """encode(text), or TextTooLong where that is sure to be more than `limit` tokens. Looks at
    beginnings of the text, each four times the one before, so the work depends on the limit and
    not on how much a client sends. May return more than `limit` tokens.
    """
    size = max(1, limit) * FIRST_CHARACTERS_A_TOKEN
    while size < len(text):
        if len(encode(text[:size])) > CERTAINTY * limit:
            raise TextTooLong
        size *= 4
    return encode(text)
