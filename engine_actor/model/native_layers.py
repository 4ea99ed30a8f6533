"""The compiled path of a forward on a CPU: all layers of a few rows in one call, beside the decoder
that runs op by op.

Knows how a batch and a model's parts become the arguments of that call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine_actor import ops
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.config import ModelConfig
from engine_actor.model.layers.rope import Rotary

LEAST_ROWS = 16
"""Taken whatever the crossover says: it times linears alone, and a compiled layer also saves the
sixty small ops of the other way."""


class NativeForward:
    """run() is the decoder's for batches that takes() lets pass; same weights, same cache."""

    def __init__(self, layers: ops.NativeLayers, most_rows: int) -> None:
        self._layers = layers
        self._most_rows = most_rows

    def __str__(self) -> str:
        """For /v1/status and the log."""
        return f"compiled layers up to {self._most_rows} rows, op by op beyond"

    def takes(self, rows: int) -> bool:
        """Whether so many rows are better off here."""
        return rows <= self._most_rows

    def run(
        self,
        x: torch.Tensor,
        kv: Sequence[torch.Tensor],
        inputs: BatchInputs,
        rotary: Rotary,
        first: int,
        last: int,
    ) -> torch.Tensor:
        """Layers first..last-1 over x fp32 [T, hidden]. x itself is left as it is, for a retry."""
        rotary.reach(max(inputs.kv_lens))
        cos, sin = rotary.tables
        step = ops.NativeStep(
            inputs.positions, inputs.slots, _sequences(inputs), inputs.block_tables, cos, sin
        )
        x = x.clone()
        self._layers.run(x, kv, step, first, last)
        return x


def _sequences(inputs: BatchInputs) -> torch.Tensor | None:
    """Which sequence each row belongs to; None where each has one row."""
    if inputs.n_tokens == len(inputs.q_lens):
        return None
    rows = [i for i, length in enumerate(inputs.q_lens) for _ in range(length)]
    return torch.tensor(rows, dtype=torch.int32)


def build_native_forward(
    config: ModelConfig,
    linears: Sequence[Mapping[str, ops.Linear]],
    norms: Sequence[Mapping[str, torch.Tensor]],
    kv_dtype: torch.dtype,
    block_tokens: int,
) -> NativeForward | str:
    """From the parts of all layers by short name (q|k|v and gate|up fused or apart), after the
    crossover is set; or the reason why not.
    """
    shape = ops.NativeShape(
        hidden=config.hidden,
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate,
        block_tokens=block_tokens,
        window=config.sliding_window,
        eps=config.rms_eps,
        query_scale=config.head_dim**-0.5,
    )
    layers = [_weights(config, *parts) for parts in zip(linears, norms, strict=True)]
    refusal = ops.refuse_native_layers(shape, layers, kv_dtype)
    if refusal is not None:
        return refusal
    limits = [linear.few_rows for layer in linears for linear in layer.values() if linear.has_both]
    most_rows = max(LEAST_ROWS, min(limits)) if limits else ops.NATIVE_MOST_ROWS
    return NativeForward(ops.NativeLayers(shape, layers), most_rows)


def _weights(
    config: ModelConfig,
    linears: Mapping[str, ops.Linear],
    norms: Mapping[str, torch.Tensor],
) -> ops.NativeLayerWeights:
    def packed(fused: str, *parts: str) -> tuple[object, ...]:
        return tuple(linears[name].packed for name in ((fused,) if fused in linears else parts))

    return ops.NativeLayerWeights(
        qkv=packed("qkv", "q", "k", "v"),
        o=linears["o"].packed,
        gate_up=packed("gate_up", "gate", "up"),
        down=linears["down"].packed,
        attn_norm=norms["attn_norm"],
        mlp_norm=norms["mlp_norm"],
        q_norm=norms["q_norm"] if config.qk_norm else None,
        k_norm=norms["k_norm"] if config.qk_norm else None,
    )
