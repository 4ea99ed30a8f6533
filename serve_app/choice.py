"""One choice on its way: parts from the engine in, deltas with text, logprobs and an end out.

Knows no HTTP and no other choice. What it says does not depend on how the engine's batches were
merged: stop strings end a text at the same token whether tokens come one by one or in a heap.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_actor.core.plan import TokenLogprobs
from engine_actor.messages import Flag
from serve_app.demux import Part
from serve_app.echo import Echo
from serve_app.protocol.errors import ApiError
from serve_app.protocol.job import Child, GenerationJob
from serve_app.protocol.logprobs import TokenEntry, mean
from serve_app.protocol.shapes import ChoiceDelta
from serve_app.text import TextStream, TextTokenizer

_REASONS = {Flag.STOP: "stop", Flag.LENGTH: "length"}
_CODES = {
    Flag.OOM: "out_of_memory",
    Flag.CANCELLED: "cancelled",
    Flag.ERROR: "internal_error",
}


class Choice:
    """Text, logprobs and end of one child of a job."""

    def __init__(self, job: GenerationJob, child: Child, tokenizer: TextTokenizer) -> None:
        prompt = job.prompts[child.prompt_index]
        self.n_tokens = 0
        """Tokens made, up to and with the one that ended the text."""
        self.cached_tokens = 0
        self.finished: str | None = None
        """The finish reason once the text has ended."""
        self._job = job
        self._index = child.index
        self._text = TextStream(
            tokenizer,
            prompt.ids,
            job.stops,
            include_stop=job.include_stop,
            min_tokens=child.sampling.min_tokens,
        )
        self._echo = Echo(prompt, job.logprobs is not None, tokenizer) if job.echo else None
        self._base = len(prompt.text) if job.echo else 0
        self._n_text = 0
        self._scored = child.sampling.logprobs is not None
        self._held: list[TokenEntry] = []
        self._ranked: list[TokenEntry] = []

    def add(self, part: Part) -> ChoiceDelta | None:
        """Take a part; None where there is nothing to show. Raises ApiError where it failed."""
        if part.usage is not None:
            self.cached_tokens = part.usage.cached_tokens
        if self.finished is not None:
            return None
        if self._echo is not None:
            self._echo.add(part.prompt_logprobs)
        text = self._add_tokens(part)
        if self.finished is None and part.finished:
            text += self._end(part)
        return self._delta(text)

    def end_at_once(self) -> ChoiceDelta:
        """A choice of which nothing is generated: the echo, or nothing, and `length`."""
        self.finished = "length"
        delta = self._delta("")
        assert delta is not None
        return delta

    def rank(self) -> float:
        """Mean logprob of all generated tokens, for best_of."""
        return mean(self._ranked)

    def _add_tokens(self, part: Part) -> str:
        """New text. Token by token only where a logprob's offset depends on it."""
        tokens = part.tokens
        if part.flag is Flag.STOP and part.stop_token is not None and tokens:
            tokens = tokens[:-1]  # its text is never shown; _end counts it
        if not self._scored:
            return self._add_text(tokens) if tokens else ""
        pieces: list[str] = []
        for token, scored in zip(tokens, part.logprobs[: len(tokens)], strict=True):
            self._hold(token, scored)
            pieces.append(self._add_text((token,)))
            if self.finished is not None:
                break
        return "".join(pieces)

    def _add_text(self, tokens: Sequence[int]) -> str:
        delta = self._text.add(tokens)
        self.n_tokens += delta.consumed
        if delta.stopped is not None:
            self.finished = "stop"
        return delta.text

    def _end(self, part: Part) -> str:
        """The engine ended this sequence: what was held back, and why it ended."""
        if part.flag not in _REASONS:
            raise ApiError(part.error_code or _CODES[part.flag])
        if part.flag is Flag.STOP and part.stop_token is not None and part.tokens:
            self.n_tokens += 1
            if self._scored and self._job.keep_stop_token:
                self._hold(part.tokens[-1], part.logprobs[len(part.tokens) - 1])
        delta = self._text.finish()
        self.finished = "stop" if delta.stopped is not None else _REASONS[part.flag]
        return delta.text

    def _hold(self, token: int, scored: TokenLogprobs) -> None:
        entry = TokenEntry(token, self._base + self._text.decoded, scored)
        self._held.append(entry)
        if self._job.best_of > self._job.n:
            self._ranked.append(entry)

    def _delta(self, text: str) -> ChoiceDelta | None:
        self._n_text += len(text)
        entries: tuple[TokenEntry, ...] = ()
        if self._job.logprobs is not None:
            entries = self._released()
        if self._echo is not None and (self._echo.complete or text or self.finished):
            text = self._echo.text + text
            entries = self._echo.entries() + entries
            self._echo = None
        if not text and not entries and self.finished is None:
            return None
        return ChoiceDelta(self._index, text, entries, self.finished)

    def _released(self) -> tuple[TokenEntry, ...]:
        """Entries of tokens whose text has begun to show. Those behind a stop string never do."""
        end = self._base + self._n_text
        if self.finished is not None and self._text.stopped is None:
            n = len(self._held)
        else:
            n = sum(1 for entry in self._held if entry.offset < end)
        released = tuple(self._held[:n])
        del self._held[:n]
        return released
