"""The prompt's share of a choice with `echo`: its text and, where asked, its tokens' logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from engine_actor.core.detok import IncrementalDetokenizer
from engine_actor.core.plan import TokenLogprobs
from serve_app.protocol.job import EncodedPrompt
from serve_app.protocol.logprobs import TokenEntry
from serve_app.text import TextTokenizer

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
        text = IncrementalDetokenizer(lambda ids: self._tokenizer.decode(ids, skip_special=False))
        offset = 0
        entries: list[TokenEntry] = []
        for position, token in enumerate(self._ids):
            scored = self._entries.get(position)
            entries.append(TokenEntry(token, min(offset, len(self.text)), scored))
            offset += len(text.add([token]))
        return tuple(entries)
