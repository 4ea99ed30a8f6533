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
    """One layer. Norm weights are fp32 [hidden]."""

    attn_norm: torch.Tensor
    attention: Attention
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection

    def apply(
        self, x: torch.Tensor, kv: torch.Tensor, step: StepTensors, rows: ops.RowOps, eps: float
    ) -> None:
        """Add both halves to x [T, hidden] in place; kv is this layer's cache."""
        x += self.attention(rows.rms_norm(x, self.attn_norm, eps), kv, step)
        x += self.down(rows.silu_mul(self.gate_up(rows.rms_norm(x, self.mlp_norm, eps))))


class Decoder:
    """All layers and the last norm."""

    def __init__(
        self, config: ModelConfig, op_set: ops.OpSet, layers: list[DecoderLayer], norm: torch.Tensor
    ) -> None:
        self._rows = op_set.rows
        self._eps = config.rms_eps
        self._norm = norm
        self.layers = layers

    def run(
        self, x: torch.Tensor, kv: list[torch.Tensor], step: StepTensors, first: int, last: int
    ) -> torch.Tensor:
        """Layers first..last-1 over x [T, hidden]. x itself is left as it is, for a retry."""
        x = x.clone()
        for layer, cache in zip(self.layers[first:last], kv[first:last], strict=True):
            layer.apply(x, cache, step, self._rows, self._eps)
        return x

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The norm before the head."""
        return self._rows.rms_norm(x, self._norm, self._eps)


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

    attention = Attention(
        config,
        op_set,
        projection("qkv", ("q", "k", "v")),
        linears["o"],
        norms["q_norm"] if config.qk_norm else None,
        norms["k_norm"] if config.qk_norm else None,
    )
    return DecoderLayer(
        norms["attn_norm"],
        attention,
        norms["mlp_norm"],
        projection("gate_up", ("gate", "up")),
        linears["down"],
    )
