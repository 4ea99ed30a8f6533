"""The decoder all families share: norm, attention, norm, gated MLP, around one residual stream.

Built weight by weight from canonical names; what a family adds (biases, norms on heads) comes with
its weights. Knows no batch layout beyond StepTensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_actor import ops
from engine_actor.model.config import ModelConfig
from engine_actor.model.layers.attention import Attention, StepTensors
from engine_actor.model.layers.linear import Projection, side_by_side


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer, ready to run."""

    attn_norm: ops.RowFn
    attention: Attention
    mlp_norm: ops.RowFn
    gate_up: Projection
    down: Projection

    silu_mul: ops.RowFn

    def apply(self, x: torch.Tensor, kv: torch.Tensor, step: StepTensors) -> None:
        """Add both halves to x [T, hidden] in place; kv is this layer's cache."""
        x += self.attention(self.attn_norm(x), kv, step)
        x += self.down(self.silu_mul(self.gate_up(self.mlp_norm(x))))


class Decoder:
    """All layers, and `norm`, the one before the head."""

    def __init__(self, layers: list[DecoderLayer], norm: ops.RowFn) -> None:
        self.layers = layers
        self.norm = norm

    def run(
        self, x: torch.Tensor, kv: list[torch.Tensor], step: StepTensors, first: int, last: int
    ) -> torch.Tensor:
        """Layers first..last-1 over x [T, hidden]. x itself is left as it is, for a retry."""
        x = x.clone()
        for layer, cache in zip(self.layers[first:last], kv[first:last], strict=True):
            layer.apply(x, cache, step)
        return x


def build_layer(
    config: ModelConfig,
    op_set: ops.OpSet,
    linears: dict[str, ops.Linear],
    norms: dict[str, torch.Tensor],
) -> DecoderLayer:
    """One layer from its weights by short name. q|k|v and gate|up come fused or apart.

    Raises KeyError naming what is missing.
    """

    def projection(fused: str, parts: tuple[str, ...]) -> Projection:
        names = (fused,) if fused in linears else parts
        return side_by_side([linears[name] for name in names])

    def norm(name: str) -> ops.RowFn:
        return op_set.rows.norm(norms[name], config.rms_eps)

    attention = Attention(
        config,
        op_set.attention,
        projection("qkv", ("q", "k", "v")),
        linears["o"],
        norm("q_norm") if config.qk_norm else None,
        norm("k_norm") if config.qk_norm else None,
    )
    return DecoderLayer(
        norm("attn_norm"),
        attention,
        norm("mlp_norm"),
        projection("gate_up", ("gate", "up")),
        linears["down"],
        op_set.rows.silu_mul,
    )
