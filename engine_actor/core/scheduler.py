"""Continuous batching: what each step computes. The only maker of StepPlans.

Knows no tensors, no text and no processes. plan() decides, commit() takes in what happened; with a
pipeline depth of 1 a plan may be made before the one before it is committed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine_actor.core.admission import admit
from engine_actor.core.capacity import PoolCapacity
from engine_actor.core.clock import Clock
from engine_actor.core.commit import Committer, Finished, Flight
from engine_actor.core.decode_plan import plan_decode
from engine_actor.core.draft import StepDraft
from engine_actor.core.kv_manager import KVManager
from engine_actor.core.limits import SchedulerLimits, require_servable
from engine_actor.core.overlap_policy import ALWAYS_SERIAL, OverlapPolicy
from engine_actor.core.plan import StepOutcome, StepPlan
from engine_actor.core.prefill_plan import plan_prefill
from engine_actor.core.queue import RankedSequences, rank_of
from engine_actor.core.roster import Roster
from engine_actor.core.sequence import FinishReason, Key, SeqState, Sequence
from engine_actor.errors import DeadlineExceeded, OutOfMemory, Overloaded

__all__ = ["Finished", "Scheduler", "SchedulerLimits", "SchedulerStats"]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """How full the scheduler is now; `preemptions` counts since the start. Blocks: `free` can be
    given out at once or after an eviction, `cached` is the evictable part of them.
    """

    running: int
    waiting: int
    preemptions: int
    free_blocks: int
    cached_blocks: int
    capacity_blocks: int


class Scheduler:
    """One engine's scheduler. Single-threaded; time comes from the clock alone."""

    def __init__(self, limits: SchedulerLimits, kv: KVManager, clock: Clock) -> None:
        self.limits = self._planned = limits
        self._kv = kv
        self._clock = clock
        self._roster = Roster(kv)
        self._committer = Committer(self._roster, kv)
        self._capacity = PoolCapacity(self._roster, kv)
        self._flights: deque[Flight] = deque()
        self._step = 0
        self._arrivals = 0
        self._next_deadline = math.inf

    @property
    def waiting(self) -> RankedSequences:
        """Sequences that wait, next to start first. Read only."""
        return self._roster.waiting

    @property
    def running(self) -> RankedSequences:
        """Sequences with blocks, last to be preempted first. Read only."""
        return self._roster.running

    @property
    def has_work(self) -> bool:
        """True while any sequence is live or any step is in flight."""
        return bool(self._roster.live) or bool(self._flights)

    @property
    def stats(self) -> SchedulerStats:
        """Counts of this moment."""
        return SchedulerStats(
            running=len(self._roster.running),
            waiting=len(self._roster.waiting),
            preemptions=self._roster.preemptions,
            free_blocks=self._kv.n_free,
            cached_blocks=self._kv.n_cached,
            capacity_blocks=self._kv.capacity,
        )

    def get(self, key: Key) -> Sequence | None:
        """The live sequence of a key."""
        return self._roster.live.get(key)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises ContextLengthExceeded or InvalidParam where it can never be
        served, Overloaded where the queue is full, ValueError on a key in use. Who will run in the
        next step, as far as there are slots, is not counted as waiting.
        """
        pool_tokens = self._capacity.target_blocks * self._kv.block_tokens
        require_servable(seq, self.limits.max_model_len, pool_tokens)
        slots = max(0, self.limits.max_num_seqs - len(self._roster.running))
        if len(self._roster.waiting) >= self.limits.max_queue + slots:
            raise Overloaded(f"{self.limits.max_queue} requests are waiting already")
        self._arrivals += 1
        ageing = self.limits.priority_ageing_s
        seq.rank = rank_of(seq.arrived, seq.priority, ageing, self._arrivals)
        self._roster.add(seq)
        if seq.deadline is not None:
            self._next_deadline = min(self._next_deadline, seq.deadline)

    def cancel(self, key: Key, code: str = "cancelled") -> Sequence | None:
        """End a live sequence now; its blocks come back once nothing of it is in flight. None where
        the key is unknown or has ended already.
        """
        return self._end(key, FinishReason.CANCELLED, code)

    def evict(self, key: Key, requeue: bool) -> Sequence | None:
        """Free the blocks of a live sequence: it ends `oom`, or starts again later (requeue)."""
        if not requeue:
            return self._end(key, FinishReason.OOM, OutOfMemory.code)
        seq = self._roster.live.get(key)
        if seq is not None and seq.state is not SeqState.WAITING:
            self._roster.preempt(seq)
        return seq

    def abort_all(self, code: str) -> tuple[Finished, ...]:
        """End everything with an error, first in rank first."""
        live = sorted(self._roster.live.values(), key=lambda seq: seq.rank)
        for seq in live:
            self._roster.finish(seq, FinishReason.ERROR, code)
        return tuple(Finished(seq, FinishReason.ERROR, code=code) for seq in live)

    def limit(
        self,
        kv_fraction: float | None = None,
        max_num_seqs: int | None = None,
        prefill_chunk_tokens: int | None = None,
    ) -> None:
        """Shrink or restore limits, none beyond what it was at the start, for which memory is
        planned; None leaves one as it is. Safe with works in flight: sequences over a smaller limit
        are preempted by the next plan and end later. The pool never shrinks below what the largest
        live request needs; that part goes when it has ended.
        """
        limits = self.limits
        if max_num_seqs is not None:
            count = min(max_num_seqs, self._planned.max_num_seqs)
            limits = replace(limits, max_num_seqs=count)
        if prefill_chunk_tokens is not None:
            count = min(prefill_chunk_tokens, self._planned.prefill_chunk_tokens)
            limits = replace(limits, prefill_chunk_tokens=count)
        if kv_fraction is not None:
            self._capacity.set_fraction(kv_fraction)
        self.limits = limits

    def resize(self, n_blocks: int) -> None:
        """Change the pool that `limit` takes its fraction of: what there is. A live request that
        comes to need more than all of it ends `oom`.
        """
        self._capacity.set_base(n_blocks)

    def victim(self, among: Iterable[Key]) -> Key:
        """Whom to end or preempt first: the youngest of the lowest priority; before all a sequence
        that has ended already, as that costs nobody. Raises ValueError on no key.
        """
        live = self._roster.live
        return max(among, key=lambda key: live[key].rank if key in live else (math.inf, 0))

    def plan(self, policy: OverlapPolicy = ALWAYS_SERIAL) -> StepPlan:
        """Decide one step; `policy` says how its two kinds of work share the device. The caller
        launches it and commits its outcome; an empty plan is neither launched nor committed. Raises
        RuntimeError where more steps than `pipeline_depth` are open.
        """
        if len(self._flights) > self.limits.pipeline_depth:
            raise RuntimeError(f"{len(self._flights)} steps are planned and not committed")
        now = self._clock.now()
        draft = StepDraft(self._roster)
        self._expire(draft, now)
        self._enforce_limits(draft)
        plan_decode(draft, self._roster, self._kv)
        # Whoever was preempted here must not come back at once and take the blocks it gave.
        if not draft.short_of_blocks:
            admit(self._roster, self._kv, self.limits.max_num_seqs, now)
        sharing = plan_prefill(draft, self._roster, self.limits, self._kv, policy, now)
        self._step += 1
        plan = draft.plan(self._step, sharing, self._kv.copies.take())
        if not plan.empty:
            self._flights.append(draft.flight(self._step))
        return plan

    def look_ahead(self, plan: StepPlan) -> None:
        """What commit() of a launched plan will need whatever comes of it, while the device works:
        the digests of its prompts' blocks.
        """
        for chunk in plan.prefill if self._kv.prefix_cache else ():
            seq = self._roster.live.get(chunk.key)
            if seq is not None:
                self._kv.digests.extend(seq, chunk.end // self._kv.block_tokens)

    def commit(self, outcome: StepOutcome) -> tuple[Finished, ...]:
        """Take in the outcome of the oldest open step: KV counted, tokens accepted, ends decided,
        blocks given back. Raises RuntimeError on an outcome of another step.
        """
        if outcome.plan.empty:
            return ()
        if not self._flights or self._flights[0].step != outcome.plan.step:
            raise RuntimeError(f"step {outcome.plan.step} is not the oldest open one")
        flight = self._flights.popleft()
        return self._committer.commit(
            flight, self._flights, outcome, self.limits, self._clock.now()
        )

    def void(self, step: int) -> frozenset[Key]:
        """Sequences of an open step whose outcome would be dropped: they have ended, or build on a
        step that has to be run again. Running them once more is not worth it."""
        return frozenset(
            launch.seq.key
            for flight in self._flights
            if flight.step == step
            for launch in flight.launches
            if launch.stale or launch.seq.state is SeqState.DONE
        )

    def check(self) -> None:
        """Prove the invariants; for tests and drills. Raises AssertionError."""
        self._roster.check()
        for seq in (*self._roster.live.values(), *self._roster.leaving):
            count = sum(launch.seq is seq for f in self._flights for launch in f.launches)
            assert seq.in_flight == count, f"{seq.key}: {seq.in_flight} in flight, not {count}"

    def _end(self, key: Key, reason: FinishReason, code: str) -> Sequence | None:
        seq = self._roster.live.get(key)
        if seq is not None:
            self._roster.finish(seq, reason, code)
        return seq

    def _expire(self, draft: StepDraft, now: float) -> None:
        if now < self._next_deadline:
            return
        for seq in list(self._roster.live.values()):
            if seq.deadline is not None and seq.deadline <= now:
                draft.refuse(seq, DeadlineExceeded.code)
        self._next_deadline = min(
            (seq.deadline for seq in self._roster.live.values() if seq.deadline is not None),
            default=math.inf,
        )

    def _enforce_limits(self, draft: StepDraft) -> None:
        """Preempt what a lowered limit has no room for."""
        for seq in self._capacity.take_displaced():
            draft.preempt(seq)
        if self._capacity.too_small:
            self._refuse_larger_than_all(draft)
        while len(self._roster.running) > self.limits.max_num_seqs:
            draft.preempt(self._roster.running.last)

    def _refuse_larger_than_all(self, draft: StepDraft) -> None:
        """Those that wait with more tokens than the whole pool holds would hold up all others."""
        for seq in tuple(self._roster.waiting):
            blocks = self._kv.blocks_for(len(seq.tokens))
            if blocks > self._kv.capacity and not seq.in_flight:
                draft.refuse(seq, OutOfMemory.code, blocks, self._kv.n_free)
