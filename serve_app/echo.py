"""The prompt's share of a choice with `echo`: its text and, where asked, its tokens' logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from engine_actor.core.detok import IncrementalDetokenizer
from engine_actor.core.plan import TokenLogprobs
from serve_app.protocol.job import EncodedPrompt
from serve_app.protocol.logprobs import TokenEntry
from serve_app.text import TextTokenizer

_SURE = 32
"""So many characters of a text tell where it begins among its decoded ids."""
Pieces = Sequence[tuple[int, tuple[TokenLogprobs, ...]]]


class Echo:
    """Collects prompt logprobs, which come in pieces as the prompt's chunks are computed. A piece
    may come again after a preemption; it then says the same.
    """

    def __init__(self, prompt: EncodedPrompt, scored: bool, tokenizer: TextTokenizer) -> None:
        self.text = prompt.text
        self._ids = prompt.ids
        self._tokenizer = tokenizer
        self._scored = scored
        self._entries: dict[int, TokenLogprobs] = {}

    def add(self, pieces: Pieces) -> None:
        """Take pieces as (first prompt position, entries)."""
        for start, entries in pieces:
            for position, entry in enumerate(entries, start):
                self._entries[position] = entry

    @property
    def complete(self) -> bool:
        """True once every position but the first, which nothing predicts, has its logprob."""
        return not self._scored or len(self._entries) >= len(self._ids) - 1

    def entries(self) -> tuple[TokenEntry, ...]:
        """The prompt's tokens with offsets into the echoed text; empty without logprobs."""
        if not self._scored:
            return ()
        return tuple(
            TokenEntry(token, offset, self._entries.get(position))
            for position, (token, offset) in enumerate(zip(self._ids, self._offsets(), strict=True))
        )

    def _offsets(self) -> list[int]:
        """Where each token begins in the text, which lacks what the tokenizer wrote around it."""
        read = IncrementalDetokenizer(lambda ids: self._tokenizer.decode(ids, skip_special=False))
        pieces = [read.add([token]) for token in self._ids]
        front = _added_in_front("".join([*pieces, read.flush()]), self.text)
        begins = list(accumulate((len(piece) for piece in pieces[:-1]), initial=-front))
        return [0, *(min(max(0, begin), len(self.text)) for begin in begins[1:])]


def _added_in_front(decoded: str, text: str) -> int:
    """Characters of a prompt's decoded ids before the prompt's own text: a bos token's name, the
    space that sentencepiece puts in front. Below 0 where it took the text's own first space.
    """
    if decoded.endswith(text) or text.endswith(decoded):
        return len(decoded) - len(text)
    # The end differs: a closing token, or characters that the tokenizer writes another way.
    bare = text.lstrip(" ")
    found = decoded.find(bare[:_SURE])
    return 0 if found < 0 else found - (len(text) - len(bare))
