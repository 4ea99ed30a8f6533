"""One request in the engine: its sequences submitted, their batches turned into choices.

The core under HTTP and the Python handle alike: `deltas()` for a stream, `results()` for a whole
answer, made from the same deltas, so that both are the same text. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from serve_app.choice import Choice
from serve_app.demux import Part, Receiver
from serve_app.engine_link import EngineLink
from serve_app.protocol import logprobs
from serve_app.protocol.errors import ApiError
from serve_app.protocol.job import GenerationJob
from serve_app.protocol.shapes import ChoiceDelta, ChoiceResult
from serve_app.protocol.usage import UsageTotals
from serve_app.public_id import format_public_id
from serve_app.text import TextTokenizer

DEADLINE_GRACE_S = 1.0
"""The engine ends what is overdue; where it cannot (it is stuck, or does not answer), we do."""


class Generation:
    """One request in flight. Made by `start`, read once through `deltas` or `results`.

    Whoever stops reading must close the iterator (or call close()); that cancels every sequence of
    the request, also those that are queued or not posted yet.
    """

    def __init__(
        self,
        job: GenerationJob,
        link: EngineLink,
        tokenizer: TextTokenizer,
        prefix: str,
        capacity: int,
    ) -> None:
        """Submit the job's sequences. Raises ApiError(unavailable)."""
        self.job = job
        self.created = int(time.time())
        self._deadline: float | None = None
        if job.deadline_ms is not None:
            self._deadline = time.monotonic() + job.deadline_ms / 1e3 + DEADLINE_GRACE_S
        self._link = link
        self._receiver: Receiver | None = None
        if job.needs_engine:
            self._receiver = link.submit(job.n_children, job.submits, capacity)
            rids = self._receiver.rids
        else:
            rids = link.reserve(job.n_children)
        self._first = rids.start
        self._open = set(rids)
        self.public_id = format_public_id(prefix, link.client, rids)
        self._wants_usage = job.include_usage or not job.stream
        try:
            # The engine need not wait for the contexts that texts begin with.
            self._choices = [Choice(job, child, tokenizer) for child in job.children()]
        except BaseException:
            self.close()
            raise

    async def deltas(
        self, at_most_s: float | None = None
    ) -> AsyncGenerator[list[ChoiceDelta], None]:
        """What is new, batch by batch; an empty list after each `at_most_s` seconds of silence.

        Raises ApiError: as it is after the first delta, `before_first_byte()` is for the caller.
        """
        if self._receiver is None:
            yield [choice.end_at_once() for choice in self._choices]
            return
        try:
            while self._open:
                try:
                    parts = await self._receiver.next(self._patience(at_most_s))
                except ApiError:
                    if all(choice.finished for choice in self._choices):
                        return  # only counts were missing; the text is whole
                    raise
                deltas = [d for rid, part in parts.items() if (d := self._take(rid, part))]
                if not parts and self._patience(None) == 0:
                    raise ApiError("deadline_exceeded")
                if deltas or not parts:
                    yield deltas
        finally:
            self.close()

    async def results(self) -> list[ChoiceResult]:
        """All choices, whole; of `best_of` the n best by mean logprob. Raises ApiError."""
        texts: list[list[str]] = [[] for _ in self._choices]
        entries: list[list[logprobs.TokenEntry]] = [[] for _ in self._choices]
        reasons: list[str] = [""] * len(self._choices)
        async for deltas in self.deltas():
            for delta in deltas:
                texts[delta.index].append(delta.text)
                entries[delta.index].extend(delta.entries)
                reasons[delta.index] = delta.finish_reason or reasons[delta.index]
        whole = [
            ChoiceResult(index, "".join(texts[index]), reasons[index], tuple(entries[index]))
            for index in range(len(self._choices))
        ]
        return self._best(whole)

    def usage(self) -> UsageTotals:
        """Counts so far; final once the deltas have ended."""
        firsts = self._choices[:: self.job.best_of]
        return UsageTotals(
            prompt_tokens=sum(len(prompt.ids) for prompt in self.job.prompts),
            completion_tokens=sum(choice.n_tokens for choice in self._choices),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
        )

    def close(self) -> None:
        """End everything that still runs. Idempotent."""
        if self._receiver is not None:
            self._link.close(self._receiver)

    def _patience(self, at_most_s: float | None) -> float | None:
        """How long to wait now: until the keep-alive or the deadline, whichever is sooner."""
        if self._deadline is None:
            return at_most_s
        left = max(0.0, self._deadline - time.monotonic())
        return left if at_most_s is None else min(left, at_most_s)

    def _take(self, rid: int, part: Part) -> ChoiceDelta | None:
        """One sequence's news as a delta; None where it shows no text yet."""
        choice = self._choices[rid - self._first]
        was_finished = choice.finished
        delta = choice.add(part)
        if part.finished:
            self._open.discard(rid)
        elif choice.finished and not was_finished:
            # A stop string, which only we can see. The engine's answer to the cancel carries the
            # cached token count; where nobody asked for it, nobody waits.
            self._link.cancel([rid], "stop_string")
            if not self._wants_usage:
                self._link.forget(rid)
                self._open.discard(rid)
        return delta

    def _best(self, whole: list[ChoiceResult]) -> list[ChoiceResult]:
        n, best_of = self.job.n, self.job.best_of
        kept: list[ChoiceResult] = []
        for start in range(0, len(whole), best_of):
            group = whole[start : start + best_of]
            if best_of > n:
                ranks = {choice.index: self._choices[choice.index].rank() for choice in group}
                group = sorted(group, key=lambda choice: (-ranks[choice.index], choice.index))[:n]
            kept.extend(group)
        return [
            ChoiceResult(index, choice.text, choice.finish_reason, choice.entries)
            for index, choice in enumerate(kept)
        ]
