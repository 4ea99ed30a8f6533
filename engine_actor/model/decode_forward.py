"""The forward of a decode over fixed tensors, as a graph is captured of it.

Knows the parts of a model; knows no bucket and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_actor import ops
from engine_actor.model.decoder import Decoder
from engine_actor.model.kv_store import KVStore
from engine_actor.model.layer_ops import OpSet
from engine_actor.model.layers.attention import StepTensors
from engine_actor.model.layers.embed import Embedding


@dataclass(frozen=True, slots=True)
class DecodeForward:
    """window: keys that a row sees, None for all before it. The ops have static plans."""

    embedding: Embedding
    decoder: Decoder
    head: ops.Linear
    op_set: OpSet
    kv: KVStore
    layout: ops.HeadLayout
    window: int | None

    def plan(self, tables: torch.Tensor, lengths: torch.Tensor, longest: int) -> ops.AttentionPlan:
        """Attention of rows whose contexts are the tensors' as they are when it runs, at most
        `longest` tokens.
        """
        assert self.op_set.static_plan is not None
        return self.op_set.static_plan(tables, lengths, longest, self.kv.block_tokens, self.window)

    def run(self, rows: ops.StagedRows, attend: ops.AttentionPlan, out: torch.Tensor) -> None:
        """The logits of whatever rows are staged go to `out`, f32[rows, vocab]. The cache's tensors
        are asked for anew: they may move.
        """
        if self.op_set.prepare_heads is not None:
            heads = self.op_set.prepare_heads(rows.cos, rows.sin, attend, self.layout)
            step = StepTensors(None, None, attend, attend_heads=heads)
        else:
            assert self.op_set.prepare_store is not None
            store = self.op_set.prepare_store(rows.cos, rows.sin, rows.slots, self.layout)
            step = StepTensors(None, None, attend, store)
        normed = self.decoder.normed(self.embedding(rows.ids), self.kv.layers, step)
        self.head.into(normed, out)
