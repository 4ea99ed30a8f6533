"""Small forwards of prompts in buckets of fixed shape, replayed from CUDA graphs.

A batch of chunks is staged into the fixed tensors of its bucket and padded; where each prompt
begins and how long it is, attention reads on the device. Chunks of a few hundred rows would
otherwise wait for the host, which launches them kernel by kernel; those of a burst do where it has
other work as well. Knows tensors and buckets; knows no layer and no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_actor import ops
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.bucket_graphs import BucketGraphs, Capture
from engine_actor.model.layers.rope import Rotary
from engine_actor.model.prefill_buckets import PrefillBucket, PrefillBuckets
from engine_actor.model.runner_protocol import GraphCounts

GRAPH_BYTES = 1 << 20
"""For one graph, of the driver: an H200 took 0.6 MiB for 189 launches, and these are 330 of 36
layers."""


Forward = Callable[[torch.Tensor], None]
"""The forward pass of a bucket's staged prompts; the logits of their last rows go to its argument,
f32[prompts, vocab]."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One bucket: its tensors and what runs over them."""

    staged: ops.StagedPrompts
    run: Callable[[], None]


class PrefillGraphs:
    """forward_of: staged prompts -> their forward. addresses: of the KV cache now. capture: not the
    one of decode graphs, beside which these may run.

    The logits of a call are overwritten by the next one.
    """

    def __init__(
        self,
        buckets: PrefillBuckets,
        forward_of: Callable[[ops.StagedPrompts], Forward],
        rotary: Rotary,
        addresses: Callable[[], tuple[int, ...]],
        capture: Capture,
        *,
        vocab_size: int,
        head_dim: int,
        block_tokens: int,
        device: torch.device,
    ) -> None:
        self.buckets = buckets
        self._graphs: BucketGraphs[PrefillBucket] = BucketGraphs(addresses, capture)
        self._forward_of = forward_of
        self._rotary = rotary
        self._block_tokens = block_tokens
        rows, keys = buckets.most_rows, buckets.most_keys
        self._staged = ops.StagedPrompts.empty(rows, keys, block_tokens, head_dim, device)
        self._logits = torch.empty(
            buckets.sequences, vocab_size, dtype=torch.float32, device=device
        )
        self._steps: dict[PrefillBucket, _Step] = {}

    @property
    def counts(self) -> GraphCounts:
        """Of all forwards that were asked about."""
        return self._graphs.counts

    def bucket_of(self, inputs: BatchInputs) -> PrefillBucket | None:
        """Where a batch has room; None where it must be launched kernel by kernel."""
        bucket = None
        if inputs.wanted is not None:
            n_keys = sum(inputs.kv_lens)
            q_lens = inputs.q_lens
            bucket = self.buckets.of(inputs.n_tokens, n_keys, len(q_lens), max(q_lens))
        self.counts.unbucketed += bucket is None
        return bucket

    def logits(self, bucket: PrefillBucket, inputs: BatchInputs) -> torch.Tensor | None:
        """Run the batch, which has room in the bucket: f32[R, vocab] of the wanted sequences' last
        rows, None where none is.
        """
        step, wanted = self._step(bucket), inputs.wanted
        self._rotary.reach(max(inputs.kv_lens))
        ops.stage_prompts(
            step.staged,
            inputs.ids,
            inputs.positions,
            inputs.slots,
            inputs.block_tables,
            (inputs.q_lens, inputs.kv_lens),
            self._block_tokens,
            self._rotary.tables,
        )
        self._graphs.run(bucket, step.run)
        if not wanted:
            return None
        if wanted == tuple(range(len(wanted))):
            return self._logits[: len(wanted)]
        return torch.stack([self._logits[index] for index in wanted])

    def warm_up(self) -> None:
        """Compile, load and capture every bucket, the largest first: what it takes serves all
        others. A capture takes a step's time several times over, which nobody should wait for who
        streams meanwhile. No KV is written.
        """
        for bucket in self.buckets:
            step = self._step(bucket)
            step.staged.clear()
            if not self._graphs.warm_up(bucket, step.run):
                return

    def cache_moved(self) -> None:
        """To be called after whatever may have moved the KV cache."""
        self._graphs.cache_moved()

    def _step(self, bucket: PrefillBucket) -> _Step:
        if bucket not in self._steps:
            staged = self._staged.first(bucket.rows, bucket.keys, self._block_tokens)
            forward = self._forward_of(staged)
            self._steps[bucket] = _Step(staged, lambda: forward(self._logits))
        return self._steps[bucket]


def static_bytes(buckets: PrefillBuckets, vocab_size: int, block_tokens: int, head_dim: int) -> int:
    """Memory that is taken when the model is loaded."""
    rows, keys = buckets.most_rows, buckets.most_keys
    width = -(-keys // block_tokens)
    each = 4 * vocab_size + 4 * width + 24
    return rows * (8 * head_dim + 16) + 4 * keys + buckets.sequences * each


def graph_bytes(buckets: PrefillBuckets, peak_bytes: int) -> int:
    """Memory that graphs take as they are captured, all of them. peak_bytes: of the activations of
    the largest, in the pool that they share.
    """
    return peak_bytes + len(buckets) * GRAPH_BYTES
