"""The engine: messages in, one step at a time, events out. Plain, single-threaded Python.

Knows the scheduler, the works and the runner; knows no thread, no process, no wire and no clock of
its own. Called by the loop only.
"""

from __future__ import annotations

import logging
import time

from configs.schema import EngineConfig
from engine_actor.core.clock import Clock, MonotonicClock
from engine_actor.core.metrics import Metrics
from engine_actor.core.overlap_policy import FixedPolicy, OverlapPolicy, Sharing
from engine_actor.core.params import InvalidParam
from engine_actor.core.plan import Failure, SampledToken, StepPlan
from engine_actor.core.scheduler import Finished, Scheduler
from engine_actor.core.sequence import FinishReason, Key, Sequence
from engine_actor.door import INVALID, Tombstones, new_sequence, refusal
from engine_actor.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    OutOfMemory,
    Overloaded,
    Unavailable,
)
from engine_actor.events import NO_EXTRA, EventLog, StepEvents
from engine_actor.facts import EngineFacts, new_kv, pipeline_depth, scheduler_limits, wanted_mode
from engine_actor.faults import FaultPlan
from engine_actor.messages import Cancel, Evict, Extra, Flag, Limit, Load, Submit
from engine_actor.model.runner_protocol import Runner
from engine_actor.model.sampler import Sampler
from engine_actor.pipeline import Pipeline, make_feed
from engine_actor.pool import Pool
from engine_actor.recorder import Recorder
from engine_actor.work.base import WorkContext, no_fault
from engine_actor.work.elastic import ElasticKV
from engine_actor.work.host_copies import Copies, make_copies
from engine_actor.work.isolate import Isolation
from engine_actor.work.pair import Pair
from engine_actor.work.sharing import share_device
from engine_actor.work.step import StepReport, StepRunner

LOGGER = logging.getLogger(__name__)
CANCELLED = "cancelled"


class Engine:
    """One model, one KV pool, one scheduler. `pair`, `depth`, `copies`: in tests only."""

    def __init__(
        self,
        config: EngineConfig,
        facts: EngineFacts,
        runner: Runner,
        sampler: Sampler,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
        pair: Pair | None = None,
        depth: int | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.config = config
        self.facts = facts
        self.runner = runner
        self.clock = clock or MonotonicClock()
        self.metrics = metrics or Metrics()
        self.draining = False
        self.kv = new_kv(config, facts)
        self.copies = copies or make_copies(runner, facts.kv_host_blocks)
        depth = pipeline_depth(config, runner.device.type) if depth is None else depth
        self.scheduler = Scheduler(
            scheduler_limits(config, facts, depth, runner.n_layers), self.kv, self.clock
        )
        first, settle = facts.kv_first_blocks, self.copies.settle
        self.elastic = ElasticKV(runner, first, facts.kv_blocks, settle)
        self._pool = Pool(self.scheduler, self.kv, self.elastic, facts.kv_blocks, self.copies)
        self.pair = pair or share_device(
            runner.device, wanted_mode(config), config.overlap_max_ctas
        )
        self.policy: OverlapPolicy = FixedPolicy(Sharing(self.pair.mode, self.pair.max_ctas))
        self.faults = FaultPlan(config.faults)
        self._live: dict[Key, Sequence] = {}
        self._tombstones = Tombstones()
        self._events = EventLog()
        self.recorder = Recorder(self.metrics)
        self._step_us = 0
        self._steps = self._step_runner(sampler, depth)
        self._pipeline = Pipeline(
            self._steps, self.scheduler, self._live.get, self._commit, depth, self.copies
        )
        self._gauges()

    def _step_runner(self, sampler: Sampler, depth: int) -> StepRunner:
        context = WorkContext(
            runner=self.runner,
            sampler=sampler,
            block_tokens=self.config.kv.block_tokens,
            eos_token_ids=frozenset(self.facts.eos_token_ids),
            request=self._live.get,
            cover=self.elastic.cover,
            hook=self.faults.hit if self.faults else no_fault,
            feed=make_feed(self.runner.device, depth, self.config),
        )
        isolation = Isolation.on(self.runner.device, self.pair)
        return StepRunner(context, isolation, self.scheduler.victim, lambda: self.kv.n_free)

    def submit(self, client: str, message: Submit) -> str | None:
        """Take in one request. None where it is accepted, else the code of the refusal."""
        self.recorder.received(self.clock.now())
        code = self._submit(client, message)
        if code is not None:
            self.recorder.rejected(code)
        return code

    def cancel(self, client: str, message: Cancel) -> None:
        """End one request; unknown ones leave a tombstone, so that a late submit ends as well. One
        that met its stop string has ended well, so it counts as `stop`.
        """
        key = (message.owner or client, message.rid)
        code = DeadlineExceeded.code if message.reason == "deadline" else CANCELLED
        seq = self.scheduler.cancel(key, code)
        if seq is None:
            self._tombstones.add(key)
        elif message.reason == "stop_string":
            self._end(seq, FinishReason.STOP)
        else:
            self._end(seq, FinishReason.CANCELLED, code)

    def evict(self, client: str, message: Evict) -> None:
        """Free one request's blocks: it ends `oom`, or starts again later."""
        key = (message.owner or client, message.rid)
        held = len(self._live[key].blocks) if key in self._live else 0
        seq = self.scheduler.evict(key, message.requeue)
        if seq is None:
            return
        self.metrics.add("evicted_total")
        if message.requeue:
            self._events.flag(*key, Flag.REQUEUED)
        else:
            self._end(seq, FinishReason.OOM, OutOfMemory.code, blocks=(held, self.kv.n_free))

    def limit(self, message: Limit) -> str | None:
        """Shrink or restore limits. A code where a value is refused; nothing has changed then."""
        try:
            self.scheduler.limit(
                message.kv_fraction, message.max_num_seqs, message.prefill_chunk_tokens
            )
        except InvalidParam:
            return INVALID
        return None

    def drop_client(self, client: str) -> int:
        """Cancel everything of a client that is gone. Returns how many requests that were."""
        keys = [key for key in self._live if key[0] == client]
        for key in keys:
            self.cancel(client, Cancel(key[1], "lease"))
        self._events.drop_client(client)
        self._tombstones.drop_client(client)
        return len(keys)

    @property
    def has_work(self) -> bool:
        """True while a step would do something, or somebody has not heard what was done."""
        return self.scheduler.has_work or bool(self._events)

    def step(self) -> StepEvents:
        """Plan and launch one step and commit those that end, or only look at one that is long.
        Raises FatalDeviceError where the device is lost; what else it raises is a bug, as fatal."""
        if not self._pipeline.holds():
            started = time.perf_counter()
            self._pool.refresh()
            plan = self.scheduler.plan(self.policy)
            for gone in plan.refused:
                blocks = (gone.blocks_needed, gone.blocks_free)
                self._end(self._live[gone.key], gone.reason, gone.code, blocks=blocks)
            self._pipeline.advance(plan, started)
        self._gauges()
        return self.take_events()

    def take_events(self) -> StepEvents:
        """What the clients have not heard yet."""
        added, evicted = self.kv.take_events()
        return StepEvents(self._events.take(), added, evicted, self.load())

    @property
    def depth(self) -> int:
        """Steps that may be launched before an earlier one is finished: 0 or 1."""
        return self._pipeline.depth

    def load(self) -> Load:
        """How busy the engine is."""
        stats = self.scheduler.stats
        free, cached = stats.free_blocks, stats.cached_blocks
        return Load(stats.running, stats.waiting, free, cached, self._step_us)

    def abort_all(self, code: str) -> StepEvents:
        """End every request with an error: the device is lost."""
        self._pipeline.drop()
        for finished in self.scheduler.abort_all(code):
            self._end(finished.seq, finished.reason, code)
        # Those that the scheduler ended in the very step that broke off.
        for seq in list(self._live.values()):
            self._end(seq, FinishReason.ERROR, code)
        return self.take_events()

    def _submit(self, client: str, message: Submit) -> str | None:
        key = (client, message.rid)
        if self.draining:
            return Unavailable.code
        code = INVALID if key in self._live else refusal(message, self.facts)
        if code is not None:
            return code
        seq = new_sequence(key, message, self.clock.now())
        if self._tombstones.take(key):
            self._events.refuse(*key, Flag.CANCELLED, CANCELLED)
            return None
        self._pool.restore()
        try:
            self.scheduler.add(seq)
        except (Overloaded, ContextLengthExceeded) as error:
            return error.code
        except InvalidParam:
            return INVALID
        self._live[key] = seq
        return None

    def _commit(self, plan: StepPlan, report: StepReport, seconds: float) -> None:
        self._step_us = int(seconds * 1e6)
        self.recorder.step(plan, report, seconds)
        outcome = report.outcome
        before = {
            sample.key: (len(seq.tokens), seq.last_token_at)
            for sample in outcome.sampled
            if (seq := self._live.get(sample.key)) is not None
        }
        # What is computed once more is scored once more.
        void = self.scheduler.void(plan.step) if outcome.prompt_logprobs else frozenset()
        finished = self.scheduler.commit(outcome)
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
        self._pool.fit()

    def _accepted(self, sample: SampledToken, n_before: int, last_token_at: float | None) -> None:
        seq = self._live[sample.key]
        tokens = tuple(seq.tokens[n_before:])
        if not tokens:
            return
        extra = NO_EXTRA if sample.logprobs is None else Extra(logprobs=(sample.logprobs,))
        self._events.add(*sample.key, tokens, extra)
        self.recorder.token(seq, last_token_at)

    def _finished(self, end: Finished, failure: Failure | None) -> None:
        blocks = (0, 0)
        if failure is not None:
            blocks = (failure.blocks_needed, failure.blocks_free)
            LOGGER.warning("%s ends %s: %s", end.seq.key, end.reason.value, failure.detail)
            if end.reason is FinishReason.OOM:
                self.metrics.add("oom_isolated_total")
        self._end(end.seq, end.reason, end.code, end.stop_token, blocks)

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        code: str | None = None,
        stop_token: int | None = None,
        blocks: tuple[int, int] = (0, 0),
    ) -> None:
        del self._live[seq.key]
        self._events.end(seq, reason, code, stop_token, blocks)
        self.recorder.ended(seq, reason, self.clock.now())

    def _grounded(self, key: Key) -> None:
        """The device has no memory for blocks that the pool promised. Promise only what exists, and
        let the sequence start again within it; one that needs more than exists ends `oom`."""
        seq = self._live.get(key)
        if seq is None:
            return
        held = len(seq.blocks)
        if held <= self._pool.cut():
            self.scheduler.evict(key, requeue=True)
        elif self.scheduler.evict(key, requeue=False) is not None:
            self.metrics.add("oom_isolated_total")
            self._end(seq, FinishReason.OOM, OutOfMemory.code, blocks=(held, self.kv.n_free))

    def _gauges(self) -> None:
        stats = self.scheduler.stats
        self.recorder.gauges(stats, self.kv, self.facts.kv_block_bytes)
        self.recorder.graphs(self.runner.graph_counts)
