"""ModelRunner: the forward passes of a causal model over paged KV, as the works see
them (runner_protocol.Runner).

Knows tensors and layers; knows no request, no scheduler, no checkpoint file.
"""

from __future__ import annotations

import torch

from engine_actor import ops
from engine_actor.model.config import ModelConfig
from engine_actor.model.decoder import Decoder
from engine_actor.model.kv_store import KVStore
from engine_actor.model.layers.attention import StepTensors
from engine_actor.model.layers.embed import Embedding
from engine_actor.model.layers.rope import Rotary
from engine_actor.model.native_layers import NativeForward
from engine_actor.work.inputs import BatchInputs

PLANS_KEPT = 4
"""Batches whose plan is remembered: a prefill run in layer ranges alternates with decodes."""


class ModelRunner:
    """Forward passes of one model on one device. Thread-bound: one engine loop calls it."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        decoder: Decoder,
        head: ops.Linear,
        op_set: ops.OpSet,
        kv: KVStore,
        device: torch.device,
        vocab_size: int,
        native: NativeForward | str = "not asked for",
    ) -> None:
        self.config = config
        self.n_layers = config.n_layers
        self.vocab_size = vocab_size
        self.device = device
        self.kv = kv
        self._embedding = embedding
        self._decoder = decoder
        self._head = head
        self.op_set = op_set
        self._rotary = Rotary(config, device)
        self._layout = ops.HeadLayout(config.n_heads, config.n_kv_heads, config.head_dim**-0.5)
        self._native = native if isinstance(native, NativeForward) else None
        self.layer_kernels = f"op by op ({native})" if isinstance(native, str) else str(native)
        self._plans: list[tuple[BatchInputs, StepTensors]] = []

    @torch.inference_mode()
    def embed(self, inputs: BatchInputs) -> torch.Tensor:
        """Hidden states [T, hidden] before layer 0."""
        return self._embedding(inputs.ids)

    @torch.inference_mode()
    def run_layers(
        self, hidden: torch.Tensor, inputs: BatchInputs, first: int, last: int
    ) -> torch.Tensor:
        """Apply layers first..last-1, writing their KV. Returns the new [T, hidden]; `hidden`
        itself is unchanged, so a failed call can be repeated.
        """
        native = self._native
        if native is not None and native.takes(hidden.shape[0]):
            return native.run(hidden, self.kv.layers, inputs, self._rotary, first, last)
        return self._decoder.run(hidden, self.kv.layers, self._plan(inputs), first, last)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, vocab_size] of the given rows of hidden."""
        # All rows wanted is the rule in decode; there is nothing to select then.
        chosen = hidden if rows.shape[0] == hidden.shape[0] else hidden.index_select(0, rows)
        return self._head(self._decoder.norm(chosen)).float()[:, : self.vocab_size]

    def decode_logits(self, inputs: BatchInputs) -> torch.Tensor:
        """fp32 logits [B, vocab_size] of a decode batch, one row a sequence."""
        hidden = self.run_layers(self.embed(inputs), inputs, 0, self.n_layers)
        return self.logits(hidden, inputs.logit_rows)

    def reserve_kv(self, capacity: int) -> None:
        """Choose the addresses of a cache of up to `capacity` blocks, empty where it moves."""
        with torch.inference_mode():
            self.kv.reserve(capacity)
        self._plans.clear()

    def resize_kv(self, n_blocks: int) -> None:
        """Grow or shrink the KV tensors to n_blocks, keeping the blocks that stay."""
        with torch.inference_mode():
            self.kv.resize(n_blocks)
        self._plans.clear()

    def kv_checksum(self, blocks: tuple[int, ...]) -> int:
        """A checksum of the named blocks' bytes."""
        return self.kv.checksum(blocks)

    def _plan(self, inputs: BatchInputs) -> StepTensors:
        for known, plan in self._plans:
            if known is inputs:
                return plan
        plan = self._make_plan(inputs)
        self._plans = [(inputs, plan), *self._plans[: PLANS_KEPT - 1]]
        return plan

    def _make_plan(self, inputs: BatchInputs) -> StepTensors:
        self._rotary.reach(max(inputs.kv_lens))
        cos, sin = self._rotary.at(inputs.positions, torch.float32)
        attend = self.op_set.plan(
            inputs.q_lens,
            inputs.kv_lens,
            inputs.block_lists,
            inputs.block_tokens,
            self.device,
            self.config.sliding_window,
        )
        if self.op_set.prepare_store is not None:
            store = self.op_set.prepare_store(cos, sin, inputs.slots, self._layout)
            return StepTensors(None, None, attend, store)
        rotate = self.op_set.rows.rotation(cos, sin, self._layout)
        return StepTensors(rotate, ops.plan_write(inputs.slots, _host_slots(inputs)), attend)


def _host_slots(inputs: BatchInputs) -> list[int]:
    """inputs.slots from its host copies, so that a GPU is not made to wait."""
    slots = []
    size = inputs.block_tokens
    for q_len, kv_len, blocks in zip(
        inputs.q_lens, inputs.kv_lens, inputs.block_lists, strict=True
    ):
        slots += [blocks[p // size] * size + p % size for p in range(kv_len - q_len, kv_len)]
    return slots
