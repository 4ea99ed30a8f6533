"""The text of one choice as its tokens arrive: detokenised, ended by stop strings, counted.

Knows no HTTP, no engine and no logprobs. The text does not depend on how the tokens are split over
calls, so a streamed answer and a whole one are made by the same few lines. At most three broken
bytes and one character less than the longest stop string are held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_actor.core.detok import IncrementalDetokenizer
from engine_actor.core.stop import StopMatcher


class Decoder(Protocol):
    """What a text needs of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class TextTokenizer(Decoder, Protocol):
    """What a choice's text and its logprobs need of a tokenizer."""

    def token_text(self, token: int, /) -> str: ...

    def token_bytes(self, token: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text that may be sent, and the stop string that ended the text, if one did. `consumed`
    of the given ids belong to the text; those behind the one that met the stop string do not.
    """

    text: str
    stopped: str | None = None
    consumed: int = 0


class TextStream:
    """Text of one sequence.

    prompt_ids: the ids in front, of which no text is given. include_stop: the stop string that ends
    the text stays in it. min_tokens: stop strings that are complete before so many ids are met are
    passed over. The caller leaves out the id that ended the sequence (eos or a stop id), or gives
    it where its text is wanted. Raises ValueError for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        def decode(ids: Sequence[int]) -> str:
            return tokenizer.decode(ids, skip_special=skip_special)

        self._detokenizer = IncrementalDetokenizer(decode, prompt_ids)
        self._matcher = StopMatcher(stops, include_stop)
        self._has_stops = bool(stops)
        self._min_tokens = min_tokens
        self._n_tokens = 0
        self.decoded = 0
        """Characters decoded so far, held ones included: where the next token's text begins."""
        self.stopped: str | None = None
        """The stop string that ended the text."""

    def add(self, ids: Sequence[int]) -> TextDelta:
        """Take the next ids. After a stop string everything more is dropped."""
        if self.stopped is not None:
            return TextDelta("")
        if not self._has_stops:
            text = self._detokenizer.add(ids)
            self._n_tokens += len(ids)
            self.decoded += len(text)
            return TextDelta(text, None, len(ids))
        pieces: list[str] = []
        for consumed, token in enumerate(ids, 1):
            text = self._detokenizer.add((token,))
            self._n_tokens += 1
            self.decoded += len(text)
            if self._n_tokens <= self._min_tokens:
                pieces.append(self._matcher.pass_over(text))
                continue
            text, self.stopped = self._matcher.add(text)
            pieces.append(text)
            if self.stopped is not None:
                return TextDelta("".join(pieces), self.stopped, consumed)
        return TextDelta("".join(pieces), None, len(ids))

    def finish(self) -> TextDelta:
        """No more ids come: release what was held back. A character that was never completed
        becomes one U+FFFD.
        """
        if self.stopped is not None:
            return TextDelta("")
        rest = self._detokenizer.flush()
        self.decoded += len(rest)
        if self._n_tokens <= self._min_tokens:
            text = self._matcher.pass_over(rest)
        else:
            text, self.stopped = self._matcher.add(rest)
        return TextDelta(text + self._matcher.flush(), self.stopped)

    @property
    def held(self) -> int:
        """Characters of whole text held back for a stop string; always less than the longest."""
        return self._matcher.held
