"""The forward over fixed tensors, with ops that read them when they run, like the GPU's: logits and
cache of the plain forward, whatever was staged before. Attention leaves NaN in padding rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from engine_actor import ops
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.forward import ModelRunner
from engine_actor.model.layer_ops import LayerCache, OpSet, PrepareStoreFn
from engine_actor.model.prefill_buckets import PrefillBucket, PrefillBuckets
from engine_actor.model.prefill_graphs import PrefillGraphs
from engine_actor.model.prompt_forward import PromptForward
from kernels.attention.op import AttentionPlan, Segment, attention_reference
from kernels.kv.op import HeadNorms, StoreFn
from tests.model.tiny_models import BLOCK, Part, batch, oracle, runner_for

CPU = torch.device("cpu")
IDS = [5, 77, 3, 12, 60, 1, 1, 44, 9, 8, 7]
BUCKETS = PrefillBuckets((8, 16, 24), (16, 64), ops.StagedPrompts.SEQUENCES)


@dataclass(frozen=True, slots=True)
class LatePlan(AttentionPlan):
    """Asks its tensors when attention runs. slots: of keys; starts: of rows and keys."""

    slots: torch.Tensor
    starts: tuple[torch.Tensor, torch.Tensor]

    def now(self) -> AttentionPlan:
        rows, keys = (starts.tolist() for starts in self.starts)
        found = [
            Segment(
                q, q_end - q, k_end - k, 0, None, tuple(self.slots[k:k_end].tolist()), None, None
            )
            for q, q_end, k, k_end in zip(rows, rows[1:], keys, keys[1:], strict=False)
            if k_end > k
        ]
        return AttentionPlan(tuple(found), (), (), 1, self.window)


@dataclass(frozen=True, slots=True)
class LateDecodes(AttentionPlan):
    tables: torch.Tensor
    lengths: torch.Tensor

    def now(self) -> AttentionPlan:
        found = [
            Segment(row, 1, length, 0, None, tuple(table), None, None)
            for row, (length, table) in enumerate(
                zip(self.lengths.tolist(), self.tables.tolist(), strict=True)
            )
            if length
        ]
        return AttentionPlan(tuple(found), (), (), self.block_tokens, self.window)


def attend(q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    assert isinstance(plan, LatePlan | LateDecodes)
    found = plan.now()
    if isinstance(plan, LatePlan):
        assert plan.starts[0][-1] == len(q), "every row is somebody's"
    out = torch.full_like(q, torch.nan).flatten(1)
    got = attention_reference(q, kv, found).flatten(1)
    for segment in found.segments:
        rows = slice(segment.first_row, segment.first_row + segment.q_len)
        out[rows] = got[rows]
    return out


def store_with(rows: ops.RowOps) -> PrepareStoreFn:
    def prepare(
        cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, layout: ops.HeadLayout
    ) -> StoreFn:
        def run(heads: torch.Tensor, kv: LayerCache, norms: HeadNorms | None) -> torch.Tensor:
            assert norms is None
            heads, real = rows.rotation(cos, sin, layout)(heads), slots >= 0
            new = heads[real, layout.queries :].unflatten(1, (2, layout.kv))
            kv.flatten(0, 1)[slots[real]] = new
            return heads[:, : layout.queries]

        return run

    return prepare


def late_ops(found: OpSet) -> OpSet:
    """Ops with static plans on a CPU."""

    def prompts(
        rows: int,
        slots: torch.Tensor,
        starts: tuple[torch.Tensor, torch.Tensor],
        size: int,
        window: int | None,
    ) -> AttentionPlan:
        return LatePlan((), (), (), size, window, slots, starts)

    def decodes(
        tables: torch.Tensor, lengths: torch.Tensor, longest: int, size: int, window: int | None
    ) -> AttentionPlan:
        return LateDecodes((), (), (), size, window, tables, lengths)

    return replace(
        found,
        attention=attend,
        prepare_store=store_with(found.rows),
        static_plan=decodes,
        static_prompts=prompts,
    )


class Recorded:
    """A capture whose replay is the function itself."""

    nbytes = 0

    def __call__(self, run):  # type: ignore[no-untyped-def]
        return run


def graphs_of(runner: ModelRunner) -> PrefillGraphs:
    forward = PromptForward(
        runner._embedding,
        runner._decoder,
        runner._head,
        late_ops(runner.op_set),
        runner.kv,
        runner._layout,
        runner.config.sliding_window,
    )
    # Its layers hold the attention that they were built with.
    for layer in runner._decoder.layers:
        layer.attention._attention = attend
    return PrefillGraphs(
        BUCKETS,
        forward.of,
        runner._rotary,
        runner.kv.addresses,
        Recorded(),
        vocab_size=runner.vocab_size,
        head_dim=runner.config.head_dim,
        block_tokens=BLOCK,
        device=CPU,
    )


def wanting(inputs: BatchInputs, wanted: Sequence[int]) -> BatchInputs:
    return replace(inputs, wanted=tuple(wanted), logit_rows=inputs.logit_rows[list(wanted)])


BATCHES = {
    "whole prompts": (
        wanting(batch([Part(IDS, 0, [3, 8, 4]), Part(IDS[4:], 0, [7, 2])]), (0, 1)),
        PrefillBucket(24, 64),
    ),
    "one prompt": (wanting(batch([Part(IDS, 0, [3, 8, 4])]), (0,)), PrefillBucket(16, 16)),
    "chunks, the second wanted": (
        wanting(batch([Part(IDS[4:6], 4, [3, 8]), Part(IDS[4:7], 4, [7, 2])]), (1,)),
        PrefillBucket(8, 16),
    ),
    "nobody wants any": (wanting(batch([Part(IDS[4:6], 4, [3, 8])]), ()), PrefillBucket(8, 16)),
    "as many as there is room for": (
        wanting(batch([Part(IDS[:2], 0, [20 + i]) for i in range(8)]), range(8)),
        PrefillBucket(16, 16),
    ),
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_logits_and_cache_are_the_plain_forwards(family: str) -> None:
    plain, staged = runner_for(oracle(family), "fast"), runner_for(oracle(family), "fast")
    first = batch([Part(IDS[:4], 0, [3]), Part(IDS[:4], 0, [7])])
    for runner in (plain, staged):
        runner.run_layers(runner.embed(first), first, 0, runner.n_layers)
    graphs = graphs_of(staged)
    with torch.inference_mode():
        for turn in range(2):
            for name, (inputs, bucket) in BATCHES.items():
                want = plain.last_logits(plain.embed(inputs), inputs, 0)
                assert graphs.bucket_of(inputs) == bucket, name
                got = graphs.logits(bucket, inputs)
                if want is None:
                    assert got is None, name
                else:
                    assert got is not None
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=name)
                for here, there in zip(staged.kv.layers, plain.kv.layers, strict=True):
                    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4, msg=name)
            assert graphs.counts.eager == 3
            assert graphs.counts.replays == 2 + 5 * turn
    assert graphs.counts.graphs == 3


@pytest.mark.parametrize(
    "inputs",
    [
        batch([Part(IDS[:2], 0, [i]) for i in range(9)]),
        batch([Part(IDS * 3, 0, range(9))]),
        batch([Part(IDS[:1], 64, range(17))]),
        replace(BATCHES["one prompt"][0], wanted=None),
    ],
    ids=["too many prompts", "too many rows", "too many keys", "rows that end no prompt"],
)
def test_what_has_no_room_is_said_to_have_none(inputs: BatchInputs) -> None:
    graphs = graphs_of(runner_for(oracle("llama"), "fast"))
    known = inputs if inputs.wanted is None and inputs.n_tokens == 11 else wanting(inputs, (0,))
    assert graphs.bucket_of(known) is None
    assert graphs.counts.unbucketed == 1
    assert graphs.bucket_of(BATCHES["one prompt"][0]) is not None


def test_warming_up_writes_nothing() -> None:
    runner = runner_for(oracle("llama"), "fast")
    graphs = graphs_of(runner)
    before = runner.kv_checksum(tuple(range(64)))
    with torch.inference_mode():
        graphs.warm_up()
    assert runner.kv_checksum(tuple(range(64))) == before
    assert graphs.counts.graphs == len(BUCKETS)
    runner.resize_kv(65)
    graphs.cache_moved()
    assert graphs.counts.dropped == len(BUCKETS)
