"""The requests that have not ended: what a step did to them, told to their clients and counted, and
the one end of each.

Knows the scheduler and the pool; knows no runner, no plan-making and no session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from engine_actor.core.clock import Clock
from engine_actor.core.kv_manager import KVManager
from engine_actor.core.plan import Failure, Refusal, SampledToken
from engine_actor.core.scheduler import Finished, Scheduler
from engine_actor.core.sequence import FinishReason, Key, Sequence
from engine_actor.errors import OutOfMemory
from engine_actor.events import NO_EXTRA, EventLog
from engine_actor.messages import Extra
from engine_actor.pool import Pool
from engine_actor.recorder import Recorder
from engine_actor.work.step import StepReport

LOGGER = logging.getLogger(__name__)


class LiveRequests:
    """By key. Whoever is added is told of exactly one end."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVManager,
        pool: Pool,
        events: EventLog,
        recorder: Recorder,
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._pool = pool
        self._events = events
        self._recorder = recorder
        self._clock = clock
        self._live: dict[Key, Sequence] = {}
        self.get: Callable[[Key], Sequence | None] = self._live.get
        """The request of a key; asked for each row of each step, so by no method of ours."""

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: Key) -> bool:
        return key in self._live

    def __iter__(self) -> Iterator[Sequence]:
        """Those of this moment; the caller may end them."""
        return iter(tuple(self._live.values()))

    def add(self, seq: Sequence) -> None:
        """One that the scheduler has taken."""
        self._live[seq.key] = seq

    def of_client(self, client: str) -> list[Key]:
        """The keys of one client's."""
        return [key for key in self._live if key[0] == client]

    def refuse(self, refusals: Iterable[Refusal]) -> None:
        """End those that a plan has no way for."""
        for gone in refusals:
            blocks = (gone.blocks_needed, gone.blocks_free)
            self.end(self._live[gone.key], gone.reason, gone.code, blocks=blocks)

    def commit(self, report: StepReport) -> None:
        """Take in the outcome of a step: scores, tokens, ends, and whom the device has no memory
        for.
        """
        outcome = report.outcome
        before = {
            sample.key: (len(seq.tokens), seq.last_token_at)
            for sample in outcome.sampled
            if (seq := self._live.get(sample.key)) is not None
        }
        # What is computed once more is scored once more.
        void = self._scheduler.void(outcome.plan.step) if outcome.prompt_logprobs else frozenset()
        finished = self._scheduler.commit(outcome)
        for key, start, entries in outcome.prompt_logprobs:
            if key in self._live and key not in void:
                self._events.add(*key, (), Extra(prompt_start=start, prompt_logprobs=entries))
        for sample in outcome.sampled:
            if sample.key in before:
                self._accepted(sample, *before[sample.key])
        failures = {failure.key: failure for failure in outcome.failures}
        for end in finished:
            self._finished(end, failures.get(end.seq.key))
        for key in report.grounded:
            self._grounded(key)

    def end(
        self,
        seq: Sequence,
        reason: FinishReason,
        code: str | None = None,
        stop_token: int | None = None,
        blocks: tuple[int, int] = (0, 0),
    ) -> None:
        """Of one that the scheduler has ended. blocks: needed and free, where too few were."""
        del self._live[seq.key]
        self._events.end(seq, reason, code, stop_token, blocks)
        self._recorder.ended(seq, reason, self._clock.now())

    def _accepted(self, sample: SampledToken, n_before: int, last_token_at: float | None) -> None:
        seq = self._live[sample.key]
        tokens = tuple(seq.tokens[n_before:])
        if not tokens:
            return
        extra = NO_EXTRA if sample.logprobs is None else Extra(logprobs=(sample.logprobs,))
        self._events.add(*sample.key, tokens, extra)
        self._recorder.token(seq, last_token_at)

    def _finished(self, end: Finished, failure: Failure | None) -> None:
        blocks = (0, 0)
        if failure is not None:
            blocks = (failure.blocks_needed, failure.blocks_free)
            LOGGER.warning("%s ends %s: %s", end.seq.key, end.reason.value, failure.detail)
            if end.reason is FinishReason.OOM:
                self._recorder.isolated()
        self.end(end.seq, end.reason, end.code, end.stop_token, blocks)

    def _grounded(self, key: Key) -> None:
        """The device has no memory for blocks that the pool promised. Promise only what exists, and
        let the sequence start again within it; one that needs more than exists ends `oom`."""
        seq = self._live.get(key)
        if seq is None:
            return
        held = len(seq.blocks)
        if held <= self._pool.cut():
            self._scheduler.evict(key, requeue=True)
        elif self._scheduler.evict(key, requeue=False) is not None:
            self._recorder.isolated()
            self.end(seq, FinishReason.OOM, OutOfMemory.code, blocks=(held, self._kv.n_free))
