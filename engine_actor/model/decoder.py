"""The decoder all families share: norm, attention, norm, gated MLP, around one residual stream.

Built weight by weight from canonical names; what a family adds (biases, norms on heads) comes with
its weights. Knows no batch layout beyond StepTensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_actor import ops
from engine_actor.model.carried import CarriedLayer, CarriedLayers
from engine_actor.model.config import ModelConfig
from engine_actor.model.layer_ops import LayerCache, OpSet
from engine_actor.model.layers.attention import Attention, StepTensors, WantedRows
from engine_actor.model.layers.linear import Projection, side_by_side

MLP_ROWS, ROW_TILE = 4096, 256
"""Rows of the MLP at a time on a GPU: what lies between its two products takes a fixed amount of
memory then; in whole tiles of the products. Half as many would stay in the second-level cache, and
lose more to rounds of tiles that are not full."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer, ready to run."""

    attn_norm: ops.RowFn
    add_attn_norm: ops.AddNormFn
    attention: Attention
    add_mlp_norm: ops.AddNormFn
    gated: Projection
    """x -> silu(gate) * up."""
    down: ops.Linear
    carried: CarriedLayer
    """The same for products that take the norms upon themselves."""

    def apply(
        self, x: torch.Tensor, delta: torch.Tensor | None, kv: LayerCache, step: StepTensors
    ) -> torch.Tensor:
        """Add `delta`, which the layer before left over, and this layer's attention to x
        [T, hidden] in place; what its MLP adds is returned. kv is this layer's cache.
        """
        normed = self.attn_norm(x) if delta is None else self.add_attn_norm(x, delta)
        normed = self.add_mlp_norm(x, self.attention(normed, kv, step))
        return self._mlp(normed)

    def store(self, x: torch.Tensor, kv: LayerCache, step: StepTensors) -> None:
        """Write the keys and values of x [T, hidden] and compute nothing else; x stays as it is."""
        self.attention.store(self.attn_norm(x), kv, step)

    def apply_rows(
        self, x: torch.Tensor, kv: LayerCache, step: StepTensors, wanted: WantedRows
    ) -> torch.Tensor:
        """The layer over x [T, hidden], of which behind the keys and values only some rows are
        wanted: [R, hidden]. x stays as it is.
        """
        added = self.attention.of_rows(self.attn_norm(x), kv, step, wanted)
        x = x.index_select(0, wanted.index)
        normed = self.add_mlp_norm(x, added)
        x += self._mlp(normed)
        return x

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows <= MLP_ROWS or not x.is_cuda:
            return self.down(self.gated(x))
        out = torch.empty_like(x)
        size = -(-rows // (-(-rows // MLP_ROWS) * ROW_TILE)) * ROW_TILE
        for part, into in zip(x.split(size), out.split(size), strict=True):
            self.down.into(self.gated(part), into)
        return out


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
        self._carried: dict[int, CarriedLayers | None] = {}

    def run(
        self, x: torch.Tensor, kv: list[LayerCache], step: StepTensors, first: int, last: int
    ) -> torch.Tensor:
        """Layers first..last-1 over x [T, hidden]. x itself is left as it is, for a retry."""
        x, delta = x.to(self._residual_dtype, copy=True), None
        for layer, cache in zip(self.layers[first:last], kv[first:last], strict=True):
            delta = layer.apply(x, delta, cache, step)
        if delta is not None:
            x += delta
        return x

    def last_rows(
        self,
        x: torch.Tensor,
        kv: list[LayerCache],
        step: StepTensors,
        wanted: WantedRows | None,
    ) -> torch.Tensor:
        """The last layer, of x [T, hidden] before it: the wanted rows behind it, [R, hidden]; no
        other row of its attention or MLP has a reader. None: nobody reads any.
        """
        x, layer = x.to(self._residual_dtype), self.layers[-1]
        if wanted is None:
            layer.store(x, kv[-1], step)
            return x[:0]
        return layer.apply_rows(x, kv[-1], step, wanted)

    def normed(self, x: torch.Tensor, kv: list[LayerCache], step: StepTensors) -> torch.Tensor:
        """All layers and the norm, as the head takes it: two launches less, and none for a norm
        between products that can take it upon themselves. x is overwritten.
        """
        x, delta = x.to(self._residual_dtype), None
        carried = self._carried_by(x)
        if carried is not None:
            return self._add_norm(x, carried.run(x, kv, step))
        for layer, cache in zip(self.layers, kv, strict=True):
            delta = layer.apply(x, delta, cache, step)
        return self.norm(x) if delta is None else self._add_norm(x, delta)

    def _carried_by(self, x: torch.Tensor) -> CarriedLayers | None:
        rows = x.shape[0]
        if rows not in self._carried:
            layers = [layer.carried for layer in self.layers]
            self._carried[rows] = CarriedLayers.of(layers, rows, x)
        return self._carried[rows]


class _LayerParts:
    """One layer's weights by short name, made ready. q|k|v and gate|up come fused or apart."""

    def __init__(
        self,
        config: ModelConfig,
        op_set: OpSet,
        linears: dict[str, ops.Linear],
        norms: dict[str, torch.Tensor],
    ) -> None:
        self._config = config
        self._op_set = op_set
        self._linears = linears
        self._norms = norms

    def norm(self, name: str) -> ops.RowFn:
        return self._op_set.rows.norm(self._norms[name], self._config.rms_eps)

    def add_norm(self, name: str) -> ops.AddNormFn:
        return self._op_set.rows.add_norm(self._norms[name], self._config.rms_eps)

    def attention(self) -> Attention:
        projected, o = self._projection("qkv", ("q", "k", "v")), self._linears["o"]
        if not self._config.qk_norm:
            return Attention(self._config, self._op_set.attention, projected, o)
        return Attention(
            self._config,
            self._op_set.attention,
            projected,
            o,
            self.norm("q_norm"),
            self.norm("k_norm"),
            ops.HeadNorms(self._norms["q_norm"], self._norms["k_norm"], self._config.rms_eps),
        )

    def gated(self) -> Projection:
        gate_up = self._projection("gate_up", ("gate", "up"))
        if "gate_up" in self._linears and self._linears["gate_up"].gated:
            return gate_up
        silu_mul = self._op_set.rows.silu_mul
        return lambda x: silu_mul(gate_up(x))

    def carried(
        self, attention: Attention, add_mlp_norm: ops.AddNormFn, gated: Projection
    ) -> CarriedLayer:
        return CarriedLayer(
            self._norms["attn_norm"].float().contiguous(),
            self._norms["mlp_norm"].float().contiguous(),
            self._config.rms_eps,
            self._linears.get("qkv"),
            attention,
            self._linears["o"],
            add_mlp_norm,
            gated,
            self._linears.get("gate_up"),
            self._linears["down"],
        )

    def _projection(self, fused: str, parts: tuple[str, ...]) -> Projection:
        names = (fused,) if fused in self._linears else parts
        return side_by_side([self._linears[name] for name in names])


def build_layer(
    config: ModelConfig,
    op_set: OpSet,
    linears: dict[str, ops.Linear],
    norms: dict[str, torch.Tensor],
) -> DecoderLayer:
    """One layer from its weights by short name. Raises KeyError naming what is missing."""
    parts = _LayerParts(config, op_set, linears, norms)
    attention, add_mlp_norm, gated = parts.attention(), parts.add_norm("mlp_norm"), parts.gated()
    return DecoderLayer(
        parts.norm("attn_norm"),
        parts.add_norm("attn_norm"),
        attention,
        add_mlp_norm,
        gated,
        linears["down"],
        parts.carried(attention, add_mlp_norm, gated),
    )
