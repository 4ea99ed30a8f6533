"""Decode steps in buckets of fixed shape, replayed from CUDA graphs where one could be captured.

A batch is staged into the fixed tensors of its bucket and padded; then its graph runs, or the same
launches one by one: bit for bit the same (bucket_graphs.py). Knows tensors and buckets; knows no
layer and no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_actor import ops
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.bucket_graphs import BucketGraphs, Capture
from engine_actor.model.decode_buckets import Bucket, DecodeBuckets
from engine_actor.model.layers.rope import Rotary
from engine_actor.model.runner_protocol import GraphCounts

MIB = 1 << 20
GRAPH_BYTES = 640 * 1024
"""For one graph: the partial sums of its attention, which outlive the step. What the driver takes
for its nodes, about as much, is not torch's (card_plan.LATER_BYTES).
"""

Forward = Callable[[ops.StagedRows, ops.AttentionPlan, torch.Tensor], None]
"""The forward pass of staged rows under a plan; the logits go to the third, f32[rows, vocab]."""


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
        self._graphs: BucketGraphs[Bucket] = BucketGraphs(addresses, capture, reason)
        self._forward = forward
        self._plan = plan
        self._rotary = rotary
        self._block_tokens = block_tokens
        most_rows, longest = buckets.rows[-1], buckets.contexts[-1]
        # Before any capture: the tables' addresses are the graphs', so they must never grow.
        rotary.reach(longest)
        self._rows = ops.StagedRows.empty(most_rows, -(-longest // block_tokens), head_dim, device)
        self._logits = torch.empty(most_rows, vocab_size, dtype=torch.float32, device=device)
        self._steps: dict[Bucket, _Step] = {}

    @property
    def counts(self) -> GraphCounts:
        """Of all steps so far."""
        return self._graphs.counts

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
        self._graphs.run(bucket, step.run)
        return step.logits[:count]

    def warm_up(self, bucket: Bucket) -> bool:
        """Compile, load and capture what a bucket needs, over padding: no KV is written. False
        where memory is out.
        """
        step = self._step(bucket)
        step.rows.lengths.zero_()
        step.rows.slots.fill_(-1)
        return self._graphs.warm_up(bucket, step.run)

    def cache_moved(self) -> None:
        """To be called after whatever may have moved the KV cache."""
        self._graphs.cache_moved()

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
