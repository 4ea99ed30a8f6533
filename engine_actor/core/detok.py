"""Token ids to text, a few ids at a time, for one sequence.

Knows no tokenizer: it is given a `decode` callable that turns a list of ids into text (and that may
drop special tokens). Decoding each id alone would be wrong: a character may be spread over several
tokens, and most decoders treat the first token of a list unlike the others (they strip its leading
space). So new ids are decoded behind a few older ones, the context, and the context's own text is
taken off again. Text whose last character may still be completed by more tokens is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

_MAX_HELD = 3
"""A UTF-8 character has at most 4 bytes and a token at least one, so at most 3 replacement
characters at the end can belong to a character that another token completes."""

_CONTEXT_KEEP = 4
_CONTEXT_TRIM_AT = 16
_CONTEXT_LIMIT = 256


class IncrementalDetokenizer:
    """Streams the text of one sequence.

    For ids whose text is valid, the joined pieces equal `decode(prompt_ids + all ids)` less
    `decode(prompt_ids)`, however the ids are split over add() calls. `prompt_ids` are the ids in
    front of the first one added; only their end is looked at, and it yields no text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        for reach in (_CONTEXT_TRIM_AT, _CONTEXT_LIMIT) if prompt_ids else ():
            self._context = self._short_context(list(prompt_ids[-reach:]))
            self._context_text = decode(self._context)
            if self._context_text:
                break
        self._trim_at = _CONTEXT_TRIM_AT
        self._pending: list[int] = []
        self._given = 0
        """How many characters of the pending ids' text have been given out already."""

    def add(self, ids: Sequence[int]) -> str:
        """Take the next ids, return the text that no later id can change."""
        return "".join([self._add_one(token) for token in ids])

    def flush(self) -> str:
        """The sequence has ended: return what was held back. A character that was never completed
        becomes one replacement character.
        """
        if not self._pending:
            return ""
        new = self._new_text(self._decode(self._context + self._pending))
        rest = new[self._given :]
        if rest and rest == REPLACEMENT * len(rest):
            rest = REPLACEMENT
        self._pending.clear()
        self._given = 0
        return rest

    @property
    def pending(self) -> int:
        """How many ids still have text that is not given out; bounded."""
        return len(self._pending)

    def _add_one(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        new = self._new_text(text)
        solid = new.rstrip(REPLACEMENT)
        broken = len(new) - len(solid)
        if not broken:
            piece = new[self._given :]
            self._settle(text)
            return piece
        safe = len(new) - min(broken, _MAX_HELD)
        piece = new[self._given : safe]
        self._given = max(self._given, safe)
        if broken > _MAX_HELD:
            self._drop_hopeless(new)
        return piece

    def _settle(self, text: str) -> None:
        """All pending text is given out: the pending ids become context."""
        # Ids without text (special tokens that decode() drops) would crowd out those with text.
        if text != self._context_text or not text:
            self._context += self._pending
            self._context_text = text
        self._pending = []
        self._given = 0
        if len(self._context) > self._trim_at:
            self._context = self._short_context(self._context)
            self._context_text = self._decode(self._context)
            self._trim_at = max(_CONTEXT_TRIM_AT, 2 * len(self._context))

    def _drop_hopeless(self, new: str) -> None:
        """Keep only the last pending ids, so that invalid bytes without end cost no memory."""
        not_given = len(new) - self._given
        for size in range(_MAX_HELD, len(self._pending)):
            tail = self._pending[-size:]
            tail_text = self._new_text(self._decode(self._context + tail))
            if new.endswith(tail_text) and len(tail_text) >= not_given:
                self._pending = tail
                self._given = len(tail_text) - not_given
                return

    def _new_text(self, text: str) -> str:
        """`text`, the decoded context and pending ids, without the context's own part."""
        known = self._context_text
        if text.startswith(known):
            return text[len(known) :]
        shared = _common_prefix(text, known)
        # A byte-fallback decoder turns the whole run of byte tokens that a broken character belongs
        # to into replacement characters, one for each byte, also those already given out.
        swallowed = len(known[shared:].encode("utf-8", "surrogatepass"))
        if text[shared : shared + swallowed] == REPLACEMENT * swallowed:
            return text[shared + swallowed :]
        return text[shared:]

    def _short_context(self, ids: list[int]) -> list[int]:
        """The shortest tail of `ids` (at least a few) that is good as a context: it has text, so
        that the first-token rule is used up inside it, and does not begin inside a character.
        """
        for size in range(_CONTEXT_KEEP, len(ids)):
            text = self._decode(ids[-size:])
            if text and REPLACEMENT not in text:
                return ids[-size:]
        return ids[-_CONTEXT_LIMIT:]


def _common_prefix(left: str, right: str) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
