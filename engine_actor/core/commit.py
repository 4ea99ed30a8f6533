"""What a joined step does to its sequences: KV counted, tokens accepted, ends decided.

Knows no plan-making. Called by the scheduler, in the order the steps were launched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_actor.core.kv_manager import KVManager
from engine_actor.core.limits import SchedulerLimits
from engine_actor.core.plan import StepOutcome
from engine_actor.core.roster import Roster
from engine_actor.core.sequence import FinishReason, SeqState, Sequence


@dataclass(slots=True)
class Launch:
    """One sequence's part of a launched step: positions start..end-1. `stale`: it builds on a token
    or on KV that an earlier step did not deliver, so its outcome means nothing.
    """

    seq: Sequence
    end: int
    samples: bool
    scores_prompt: bool = False
    stale: bool = False
    is_range: bool = False


@dataclass(slots=True)
class Flight:
    """One launched step that is not joined yet."""

    step: int
    launches: list[Launch]


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that ended in this step. `stop_token` where a token ended it, `code` where an
    error did.
    """

    seq: Sequence
    reason: FinishReason
    stop_token: int | None = None
    code: str | None = None


class Committer:
    """Applies outcomes to sequences."""

    def __init__(self, roster: Roster, kv: KVManager) -> None:
        self._roster = roster
        self._kv = kv

    def commit(
        self,
        flight: Flight,
        later: Iterable[Flight],
        outcome: StepOutcome,
        limits: SchedulerLimits,
        now: float,
    ) -> tuple[Finished, ...]:
        """Apply one outcome. `later` are the steps still in flight behind it."""
        computed = dict(outcome.computed)
        tokens = {sample.key: sample.token for sample in outcome.sampled}
        failures = {failure.key: failure for failure in outcome.failures}
        finished: list[Finished] = []
        for launch in flight.launches:
            seq = launch.seq
            seq.in_flight -= 1
            if seq.state is not SeqState.DONE and not launch.stale:
                failure = failures.get(seq.key)
                if failure is not None:
                    self._roster.finish(seq, failure.reason, failure.code)
                    finished.append(Finished(seq, failure.reason, code=failure.code))
                else:
                    token = tokens.get(seq.key) if launch.samples else None
                    if not self._join(launch, computed.get(seq.key), token):
                        self._rewind(launch, later)
                    elif (end := self._accept(seq, launch, token, limits, now)) is not None:
                        finished.append(end)
                    elif seq.key in outcome.rerun:
                        self._rewind(launch, later)
            if seq in self._roster.leaving:
                self._roster.settle(seq)
        return tuple(finished)

    def _join(self, launch: Launch, computed: int | None, token: int | None) -> bool:
        """Count the positions whose KV is valid now. False where the work did not do all it was
        planned to, so that a part of it must be planned again.
        """
        seq = launch.seq
        if computed is None or (launch.samples and computed >= launch.end and token is None):
            return False
        if computed > launch.end:
            raise ValueError(f"{seq.key}: {computed} positions computed, {launch.end} were planned")
        seq.n_computed = max(seq.n_computed, computed)
        if launch.scores_prompt:
            seq.n_prompt_scored = max(seq.n_prompt_scored, min(computed, seq.n_prompt - 1))
        if seq.n_computed // self._kv.block_tokens > seq.n_registered:
            self._kv.register(seq)
        return computed == launch.end

    def _rewind(self, failed: Launch, later: Iterable[Flight]) -> None:
        """Plan again from the last valid position; what was launched beyond it is void."""
        seq = failed.seq
        seq.n_scheduled = seq.n_computed
        seq.next_layer = 0
        # A whole chunk can be made smaller until it passes, a range of layers cannot.
        seq.whole_chunks = seq.whole_chunks or failed.is_range
        for flight in later:
            for launch in flight.launches:
                if launch.seq is seq:
                    launch.stale = True

    def _accept(
        self,
        seq: Sequence,
        launch: Launch,
        token: int | None,
        limits: SchedulerLimits,
        now: float,
    ) -> Finished | None:
        """Take the sampled token, if any, and say whether the sequence has ended."""
        sampling = seq.sampling
        if token is None:
            if sampling.max_tokens == 0 and launch.end == len(seq.tokens):
                self._roster.finish(seq, FinishReason.LENGTH)
                return Finished(seq, FinishReason.LENGTH)
            return None
        seq.tokens.append(token)
        if seq.first_token_at is None:
            seq.first_token_at = now
        seq.last_token_at = now
        if seq.state is SeqState.PREFILL:
            seq.move(SeqState.DECODE)
        stops = token in sampling.stop_token_ids or (
            token in limits.eos_token_ids and not sampling.ignore_eos
        )
        if stops and seq.n_output > sampling.min_tokens:
            self._roster.finish(seq, FinishReason.STOP)
            return Finished(seq, FinishReason.STOP, stop_token=token)
        if seq.n_output >= sampling.max_tokens or len(seq.tokens) >= limits.max_model_len:
            self._roster.finish(seq, FinishReason.LENGTH)
            return Finished(seq, FinishReason.LENGTH)
        return None
