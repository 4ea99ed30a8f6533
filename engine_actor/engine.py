"""The engine: messages in, one step at a time, events out. Plain, single-threaded Python.

Knows the scheduler, the works and the runner; knows no thread, no process, no wire and no clock of
its own. Called by the loop only.
"""

from __future__ import annotations

import time

from configs.schema import EngineConfig
from engine_actor.core.clock import Clock, MonotonicClock
from engine_actor.core.metrics import Metrics
from engine_actor.core.overlap_policy import FixedPolicy, OverlapPolicy, Sharing
from engine_actor.core.params import InvalidParam
from engine_actor.core.plan import StepPlan
from engine_actor.core.scheduler import Scheduler
from engine_actor.core.sequence import FinishReason
from engine_actor.door import INVALID, Tombstones, new_sequence, refusal
from engine_actor.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    OutOfMemory,
    Overloaded,
    Unavailable,
)
from engine_actor.events import EventLog, StepEvents
from engine_actor.facts import EngineFacts, new_kv, pipeline_depth, scheduler_limits, wanted_mode
from engine_actor.faults import FaultPlan
from engine_actor.live_requests import LiveRequests
from engine_actor.messages import Cancel, Evict, Flag, Limit, Load, Submit
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
        self._tombstones = Tombstones()
        self._events = EventLog()
        self.recorder = Recorder(self.metrics)
        self._live = LiveRequests(
            self.scheduler, self.kv, self._pool, self._events, self.recorder, self.clock
        )
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
            self._live.end(seq, FinishReason.STOP)
        else:
            self._live.end(seq, FinishReason.CANCELLED, code)

    def evict(self, client: str, message: Evict) -> None:
        """Free one request's blocks: it ends `oom`, or starts again later."""
        key = (message.owner or client, message.rid)
        live = self._live.get(key)
        held = 0 if live is None else len(live.blocks)
        seq = self.scheduler.evict(key, message.requeue)
        if seq is None:
            return
        self.metrics.add("evicted_total")
        if message.requeue:
            self._events.flag(*key, Flag.REQUEUED)
        else:
            self._live.end(seq, FinishReason.OOM, OutOfMemory.code, blocks=(held, self.kv.n_free))

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
        keys = self._live.of_client(client)
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
            self._live.refuse(plan.refused)
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
            self._live.end(finished.seq, finished.reason, code)
        # Those that the scheduler ended in the very step that broke off.
        for seq in self._live:
            self._live.end(seq, FinishReason.ERROR, code)
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
            self.recorder.ended(seq, FinishReason.CANCELLED, seq.arrived)
            return None
        self._pool.restore()
        try:
            self.scheduler.add(seq)
        except (Overloaded, ContextLengthExceeded) as error:
            return error.code
        except InvalidParam:
            return INVALID
        self._live.add(seq)
        return None

    def _commit(self, plan: StepPlan, report: StepReport, seconds: float) -> None:
        self._step_us = int(seconds * 1e6)
        self.recorder.step(plan, report, seconds)
        self._live.commit(report)
        self._pool.fit()

    def _gauges(self) -> None:
        stats = self.scheduler.stats
        self.recorder.gauges(stats, self.kv, self.facts.kv_block_bytes)
        self.recorder.graphs(self.runner.graph_counts)
