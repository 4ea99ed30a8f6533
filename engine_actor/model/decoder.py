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
    add_attn_norm: ops.AddNormFn
    attention: Attention
    add_mlp_norm: ops.AddNormFn
    gated: Projection
    """x -> silu(gate) * up."""
    down: Projection

    def apply(
        self, x: torch.Tensor, delta: torch.Tensor | None, kv: ops.LayerCache, step: StepTensors
    ) -> torch.Tensor:
        """Add `delta`, which the layer before left over, and this layer's attention to x
        [T, hidden] in place; what its MLP adds is returned. kv is this layer's cache.
        """
        normed = self.attn_norm(x) if delta is None else self.add_attn_norm(x, delta)
        normed = self.add_mlp_norm(x, self.attention(normed, kv, step))
        return self.down(self.gated(normed))


class Decoder:
    """All layers, and `norm`, the one before the head, `add_norm` behind a residual add.
    residual_dtype: of the stream between.
    """

    def __init__(
        self,
        layers: list[DecoderLayer],
        norm: ops.RowFn,
        add_norm: ops.AddNormFn,
        residual_dtype: torch.dtype,
    ) -> None:
        self.layers = layers
        self.norm = norm
        self._add_norm = add_norm
        self._residual_dtype = residual_dtype

    def run(
        self, x: torch.Tensor, kv: list[ops.LayerCache], step: StepTensors, first: int, last: int
    ) -> torch.Tensor:
        """Layers first..last-1 over x [T, hidden]. x itself is left as it is, for a retry."""
        x, delta = x.to(self._residual_dtype, copy=True), None
        for layer, cache in zip(self.layers[first:last], kv[first:last], strict=True):
            delta = layer.apply(x, delta, cache, step)
        if delta is not None:
            x += delta
        return x

    def normed(self, x: torch.Tensor, kv: list[ops.LayerCache], step: StepTensors) -> torch.Tensor:
        """All layers and the norm, as the head takes it: two launches less. x is overwritten."""
        x, delta = x.to(self._residual_dtype), None
        for layer, cache in zip(self.layers, kv, strict=True):
            delta = layer.apply(x, delta, cache, step)
        return self.norm(x) if delta is None else self._add_norm(x, delta)


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

    def gated() -> Projection:
        gate_up, silu_mul = projection("gate_up", ("gate", "up")), op_set.rows.silu_mul
        if "gate_up" in linears and linears["gate_up"].gated:
            return gate_up
        return lambda x: silu_mul(gate_up(x))

    def norm(name: str) -> ops.RowFn:
        return op_set.rows.norm(norms[name], config.rms_eps)

    def add_norm(name: str) -> ops.AddNormFn:
        return op_set.rows.add_norm(norms[name], config.rms_eps)

    attention = Attention(
        config,
        op_set.attention,
        projection("qkv", ("q", "k", "v")),
        linears["o"],
        norm("q_norm") if config.qk_norm else None,
        norm("k_norm") if config.qk_norm else None,
        ops.HeadNorms(norms["q_norm"], norms["k_norm"], config.rms_eps) if config.qk_norm else None,
    )
    return DecoderLayer(
        norm("attn_norm"),
        add_norm("attn_norm"),
        attention,
        add_norm("mlp_norm"),
        gated(),
        linears["down"],
    )
