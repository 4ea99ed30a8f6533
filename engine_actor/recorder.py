"""What the engine counts: the one place that turns steps and requests into metrics."""

from __future__ import annotations

from collections import deque

from engine_actor.core.kv_manager import KVManager
from engine_actor.core.metrics import Metrics
from engine_actor.core.plan import StepOutcome, StepPlan
from engine_actor.core.scheduler import SchedulerStats
from engine_actor.core.sequence import FinishReason, Sequence
from engine_actor.model.runner_protocol import GraphCounts
from engine_actor.work.step import StepReport

KEPT_ARRIVALS = 64


class Recorder:
    """Writes to one Metrics; only the engine's thread calls it. `arrivals`: when the last requests
    came, seconds of the engine's clock, which is the machine's: a bench gives them to another.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.arrivals: deque[float] = deque(maxlen=KEPT_ARRIVALS)

    def step(self, plan: StepPlan, report: StepReport, seconds: float) -> None:
        """One step that launched something. `seconds`: host work included."""
        metrics, outcome = self.metrics, report.outcome
        metrics.add("engine_steps_total")
        metrics.observe("step_seconds", seconds)
        if plan.prefill:
            metrics.add("prefill_steps_total")
            computed = dict(outcome.computed)
            for chunk in plan.prefill:
                count = computed.get(chunk.key, chunk.start) - chunk.start
                if count > 0:
                    metrics.add("computed_prompt_tokens_total", count)
                    metrics.observe("prefill_chunk_tokens", count)
        if plan.decode:
            metrics.add("decode_steps_total")
            metrics.observe("decode_batch_rows", len(plan.decode))
        if outcome.prefill_seconds is not None:
            metrics.observe("prefill_chunk_seconds", outcome.prefill_seconds)
        if outcome.decode_seconds is not None:
            metrics.observe("decode_step_seconds", outcome.decode_seconds)
        if outcome.mixed_seconds is not None:
            metrics.observe("mixed_forward_seconds", outcome.mixed_seconds)
        self._overlap(outcome)
        if report.retries:
            metrics.add("oom_retries_total", report.retries)

    def _overlap(self, outcome: StepOutcome) -> None:
        """Same cycle and same time are two facts with two counters."""
        metrics = self.metrics
        if outcome.logical_overlap:
            metrics.add("prefill_decode_overlap_steps")
            metrics.add("prefill_decode_overlap_mode_steps", 1, outcome.plan.mode.value)
        if outcome.stream_overlap:
            metrics.add("prefill_decode_stream_overlap_steps")
            metrics.add("prefill_decode_overlapped_seconds", outcome.overlapped_seconds)
        if outcome.mixed_forward:
            metrics.add("prefill_decode_mixed_forward_steps")

    def token(self, seq: Sequence, last_token_at: float | None) -> None:
        """One accepted token. `last_token_at`: when the one before it was."""
        metrics, now = self.metrics, seq.last_token_at
        metrics.add("generation_tokens_total")
        if now is None:
            return
        if last_token_at is not None:
            metrics.observe("inter_token_latency_seconds", now - last_token_at)
            return
        metrics.observe("ttft_seconds", now - seq.arrived)
        self._prompt(seq)

    def _prompt(self, seq: Sequence) -> None:
        """Once for each request that was ever scheduled: at its first token, or at its end where
        there was none. Not before, as who is sent back finds other blocks in the prefix cache."""
        if seq.admitted_at is None:
            return
        metrics = self.metrics
        metrics.observe("queue_seconds", seq.admitted_at - seq.arrived)
        metrics.add("prompt_tokens_total", seq.n_prompt)
        metrics.add("cached_prompt_tokens_total", seq.n_cached)
        metrics.observe("request_prompt_tokens", seq.n_prompt)

    def received(self, now: float) -> None:
        self.arrivals.append(now)
        self.metrics.add("requests_received_total")

    def rejected(self, code: str) -> None:
        self.metrics.add("admission_rejections_total", 1, code)

    def ended(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """The one end of an accepted request."""
        metrics = self.metrics
        metrics.add("requests_finished_total", 1, reason.value)
        metrics.observe("e2e_latency_seconds", now - seq.arrived)
        metrics.observe("request_generation_tokens", seq.n_output)
        if seq.first_token_at is None:
            self._prompt(seq)
        if reason is FinishReason.CANCELLED:
            metrics.add("cancelled_total")
        if seq.n_output > 1 and seq.first_token_at is not None and seq.last_token_at is not None:
            span = seq.last_token_at - seq.first_token_at
            metrics.observe("time_per_output_token_seconds", span / (seq.n_output - 1))

    def isolated(self) -> None:
        """An out-of-memory error has ended one request and nothing else."""
        self.metrics.add("oom_isolated_total")

    def gauges(self, stats: SchedulerStats, kv: KVManager, block_bytes: int) -> None:
        metrics = self.metrics
        metrics.set("requests_running", stats.running)
        metrics.set("requests_waiting", stats.waiting)
        known = metrics.value("preemptions_total")
        metrics.add("preemptions_total", stats.preemptions - known)
        metrics.set("kv_blocks_total", kv.capacity)
        metrics.set("kv_blocks_free", kv.n_free)
        metrics.set("kv_blocks_cached", kv.n_cached)
        metrics.set("kv_bytes_total", kv.capacity * block_bytes)
        tier = kv.tier
        metrics.set("kv_host_blocks_total", tier.n_slots)
        metrics.set("kv_host_blocks_used", len(tier))
        self._count_to("kv_host_hit_tokens_total", tier.n_copied_back * kv.block_tokens)
        self._count_to("kv_host_bytes_out_total", tier.n_copied_out * block_bytes)
        self._count_to("kv_host_bytes_back_total", tier.n_copied_back * block_bytes)
        self._count_to("kv_host_dropped_total", tier.n_dropped)

    def graphs(self, counts: GraphCounts) -> None:
        """What the runner counted so far."""
        metrics = self.metrics
        metrics.set("decode_graphs", counts.graphs)
        metrics.set("decode_graph_bytes", counts.nbytes)
        self._count_to("decode_graph_replays_total", counts.replays)
        self._count_to("decode_graph_failures_total", counts.failures)

    def _count_to(self, name: str, total: float) -> None:
        """Bring a counter up to what somebody else has counted."""
        self.metrics.add(name, max(0.0, total - self.metrics.value(name)))
