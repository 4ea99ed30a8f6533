"""Decode steps in buckets of fixed shape, replayed from CUDA graphs where one could be captured.

A batch is staged into the fixed tensors of its bucket and padded; then its graph runs, or the same
launches one by one: bit for bit the same. A graph is captured when its bucket is first used, and
dropped when the KV cache has moved. Knows tensors and buckets; knows no layer and no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine_actor import ops
from engine_actor.model.decode_buckets import Bucket, DecodeBuckets
from engine_actor.model.layers.rope import Rotary
from engine_actor.model.runner_protocol import GraphCounts
from engine_actor.work.inputs import BatchInputs

LOGGER = logging.getLogger(__name__)
MIB = 1 << 20
GRAPH_BYTES = 640 * 1024
"""For one graph: the partial sums of its attention, which outlive the step. What the driver takes
for its nodes, about as much, is not torch's (card_plan.LATER_BYTES).
"""

Forward = Callable[[ops.StagedRows, ops.AttentionPlan, torch.Tensor], None]
"""The forward pass of staged rows under a plan; the logits go to the third, f32[rows, vocab]."""


class Capture(Protocol):
    """As graph_capture.CudaCapture."""

    nbytes: int

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True)
class _Step:
    """One bucket: its tensors and what runs over them."""

    rows: ops.StagedRows
    logits: torch.Tensor
    run: Callable[[], None]


class DecodeGraphs:
    """The decode forward of one model. plan: attention over (tables, lengths, longest context).
    addresses: of the KV cache now. capture: None runs the buckets' launches one by one.

    The logits of a call are overwritten by the next one.
    """

    def __init__(
        self,
        buckets: DecodeBuckets,
        forward: Forward,
        plan: Callable[[torch.Tensor, torch.Tensor, int], ops.AttentionPlan],
        rotary: Rotary,
        addresses: Callable[[], tuple[int, ...]],
        capture: Capture | None,
        *,
        vocab_size: int,
        head_dim: int,
        block_tokens: int,
        device: torch.device,
        reason: str | None = None,
    ) -> None:
        self.buckets = buckets
        self.counts = GraphCounts(reason)
        self._forward = forward
        self._plan = plan
        self._rotary = rotary
        self._addresses = addresses
        self._capture = capture
        self._block_tokens = block_tokens
        most_rows, longest = buckets.rows[-1], buckets.contexts[-1]
        # Before any capture: the tables' addresses are the graphs', so they must never grow.
        rotary.reach(longest)
        self._rows = ops.StagedRows.empty(most_rows, -(-longest // block_tokens), head_dim, device)
        self._logits = torch.empty(most_rows, vocab_size, dtype=torch.float32, device=device)
        self._steps: dict[Bucket, _Step] = {}
        self._graphs: dict[Bucket, Callable[[], None]] = {}
        self._refused: set[Bucket] = set()
        self._captured_at: tuple[int, ...] = ()

    def logits(self, inputs: BatchInputs) -> torch.Tensor | None:
        """f32[B, vocab] of a decode batch; None where it fits no bucket, and nothing has run."""
        count = len(inputs.q_lens)
        bucket = self.buckets.of(count, max(inputs.kv_lens))
        if bucket is None or inputs.n_tokens != count:
            self.counts.unbucketed += 1
            return None
        step = self._step(bucket)
        ops.stage_decode(
            step.rows,
            inputs.ids,
            inputs.positions,
            inputs.slots,
            inputs.block_tables,
            self._rotary.tables,
        )
        self._run(bucket, step)
        return step.logits[:count]

    def warm_up(self, bucket: Bucket) -> bool:
        """Compile, load and capture what a bucket needs, over padding: no KV is written. False
        where memory is out: a batch of that size may meet that too, but nothing at start needs it.
        """
        try:
            step = self._step(bucket)
            step.rows.lengths.zero_()
            step.rows.slots.fill_(-1)
            self._run(bucket, step)
        except (torch.OutOfMemoryError, MemoryError) as error:
            LOGGER.warning("no memory to warm up %s: %s", bucket, error)
            return False
        return True

    def cache_moved(self) -> None:
        """To be called after whatever may have moved the KV cache: drops graphs that hold addresses
        which are no longer its own.
        """
        if self._graphs and self._addresses() != self._captured_at:
            self.counts.dropped += len(self._graphs)
            self._graphs.clear()
        self.counts.graphs = len(self._graphs)
        self._refused.clear()

    def _run(self, bucket: Bucket, step: _Step) -> None:
        replay = self._graphs.get(bucket)
        if replay is not None:
            replay()
            self.counts.replays += 1
            return
        # The first run loads every kernel and takes the scratch that outlives the step: neither may
        # happen in a capture. Its logits are this step's.
        step.run()
        self.counts.eager += 1
        if self._capture is not None and bucket not in self._refused:
            self._record(bucket, step, self._capture)

    def _record(self, bucket: Bucket, step: _Step, capture: Capture) -> None:
        here = self._addresses()
        try:
            replay = capture(step.run)
        except Exception as error:
            # Nobody's request is to blame: the step has run. A device that is lost says so at the
            # next call.
            self._refused.add(bucket)
            self.counts.failures += 1
            LOGGER.warning("no CUDA graph for %s, its steps run without: %s", bucket, error)
            return
        self._graphs[bucket] = replay
        self._captured_at = here
        self.counts.graphs = len(self._graphs)
        self.counts.nbytes = capture.nbytes

    def _step(self, bucket: Bucket) -> _Step:
        if bucket not in self._steps:
            rows = self._rows.first(bucket.rows, -(-bucket.context // self._block_tokens))
            plan = self._plan(rows.tables, rows.lengths, bucket.context)
            logits = self._logits[: bucket.rows]

            def run() -> None:
                self._forward(rows, plan, logits)

            self._steps[bucket] = _Step(rows, logits, run)
        return self._steps[bucket]


def static_bytes(buckets: DecodeBuckets, vocab_size: int, block_tokens: int, head_dim: int) -> int:
    """Memory that is taken when the model is loaded, graphs or not."""
    rows, width = buckets.rows[-1], -(-buckets.contexts[-1] // block_tokens)
    return rows * (4 * vocab_size + 4 * width + 8 * head_dim + 20)


def graph_bytes(buckets: DecodeBuckets, row_bytes: int) -> int:
    """Memory that graphs take as they are captured, all of them. row_bytes: of one row's
    activations in flight: graphs share a pool, and the largest is captured first.
    """
    return buckets.rows[-1] * row_bytes + len(buckets) * GRAPH_BYTES
