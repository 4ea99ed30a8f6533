"""Decoder layers whose norms are part of the products around them: two launches less a layer.

Which norms those are depends on which kernels run for so many rows (ops.Linear.carrier). Knows the
order of a layer's parts as decoder.py does; knows no batch layout beyond StepTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_actor import ops
from engine_actor.model.layer_ops import LayerCache
from engine_actor.model.layers.attention import Attention, StepTensors
from engine_actor.model.layers.linear import Projection

CARRY_NORMS = True
"""Off, every norm has a launch of its own, for comparison."""


@dataclass(frozen=True, slots=True, eq=False)
class CarriedLayer:
    """One layer's parts. Weights of norms f32[hidden]; qkv, gate_up: None where they come apart."""

    attn_weight: torch.Tensor
    mlp_weight: torch.Tensor
    eps: float
    qkv: ops.Linear | None
    attention: Attention
    o: ops.Linear
    add_mlp_norm: ops.AddNormFn
    gated: Projection
    gate_up: ops.Linear | None
    down: ops.Linear


@dataclass(frozen=True, slots=True, eq=False)
class _Carriers:
    """Of one layer, for so many rows. o and gate_up: both or neither."""

    qkv: ops.StripFew
    down: ops.StripFew
    o: ops.StripFew | None
    gate_up: ops.StripFew | None


class CarriedLayers:
    """All layers for a number of rows whose products carry the norm between two layers, and perhaps
    the one within."""

    def __init__(self, layers: Sequence[CarriedLayer], carriers: Sequence[_Carriers]) -> None:
        self._layers = layers
        self._carriers = carriers

    @classmethod
    def of(
        cls, layers: Sequence[CarriedLayer], rows: int, stream: torch.Tensor
    ) -> CarriedLayers | None:
        """None where the products of a layer cannot. stream: one like those to come."""
        if (
            not CARRY_NORMS
            or not layers
            or not stream.is_cuda
            or ops.refuse_carry(stream) is not None
        ):
            return None
        carriers = []
        for layer in layers:
            qkv = None if layer.qkv is None else layer.qkv.carrier(rows)
            down, o = layer.down.carrier(rows), layer.o.carrier(rows)
            if qkv is None or down is None:
                return None
            is_gated = layer.gate_up is not None and layer.gate_up.gated
            gate_up = layer.gate_up.carrier(rows) if layer.gate_up and is_gated else None
            both = o is not None and gate_up is not None
            carriers.append(_Carriers(qkv, down, o if both else None, gate_up if both else None))
        return cls(layers, carriers)

    def run(
        self, stream: torch.Tensor, kv: Sequence[LayerCache], step: StepTensors
    ) -> torch.Tensor:
        """Run the stream [rows, hidden] through all layers in place, but for what the last one's
        MLP adds, which is returned.
        """
        first = self._layers[0]
        carry = ops.Carry.of(stream, first.eps)
        ops.leave_norm(stream, first.attn_weight, first.eps, carry.x, carry.squares, carry.lifts[0])
        following = [layer.attn_weight for layer in self._layers[1:]]
        for layer, by, cache, weight in zip(
            self._layers, self._carriers, kv, [*following, None], strict=True
        ):
            attended = layer.attention.attend(by.qkv.normed(carry), cache, step)
            if by.o is not None and by.gate_up is not None:
                by.o.add_to(carry, attended, layer.mlp_weight)
                gated = by.gate_up.normed(carry)
            else:
                gated = layer.gated(layer.add_mlp_norm(stream, layer.o(attended)))
            if weight is not None:
                by.down.add_to(carry, gated, weight)
        return by.down(gated)
