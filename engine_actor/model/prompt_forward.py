"""The forward of a small batch of prompts over fixed tensors, as a graph is captured of it.

Knows the parts of a model; knows no bucket and no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_actor import ops
from engine_actor.model.decoder import Decoder
from engine_actor.model.kv_store import KVStore
from engine_actor.model.layer_ops import OpSet
from engine_actor.model.layers.attention import StepTensors, WantedRows
from engine_actor.model.layers.embed import Embedding


@dataclass(frozen=True, slots=True)
class PromptForward:
    """window: keys that a row sees, None for all before it. The ops have static plans."""

    embedding: Embedding
    decoder: Decoder
    head: ops.Linear
    op_set: OpSet
    kv: KVStore
    layout: ops.HeadLayout
    window: int | None

    def of(self, staged: ops.StagedPrompts) -> Callable[[torch.Tensor], None]:
        """What computes whatever prompts are staged: the logits of each one's last row go to its
        argument, f32[SEQUENCES, vocab].
        """
        plan_rows, plan_last = self.op_set.static_prompts, self.op_set.static_plan
        assert plan_rows is not None
        assert plan_last is not None
        size, n_keys = self.kv.block_tokens, len(staged.key_slots)
        starts = staged.q_starts, staged.k_starts
        attend = plan_rows(len(staged.ids), staged.key_slots, starts, size, self.window)
        attend_last = plan_last(staged.tables, staged.lengths, n_keys, size, self.window)
        read = WantedRows(staged.last_rows, attend_last)
        return lambda out: self._run(staged, attend, read, out)

    def _run(
        self,
        staged: ops.StagedPrompts,
        attend: ops.AttentionPlan,
        read: WantedRows,
        out: torch.Tensor,
    ) -> None:
        """As ModelRunner.last_logits(). The cache's tensors are asked for anew: they may move."""
        assert self.op_set.prepare_store is not None
        store = self.op_set.prepare_store(staged.cos, staged.sin, staged.slots, self.layout)
        step, layers = StepTensors(None, None, attend, store), self.kv.layers
        hidden = self.embedding(staged.ids)
        hidden = self.decoder.run(hidden, layers, step, 0, len(layers) - 1)
        hidden = self.decoder.last_rows(hidden, layers, step, read)
        self.head.into(self.decoder.norm(hidden), out)
