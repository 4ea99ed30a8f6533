"""One decoder layer over many token sequences, half by half, through the engine's own layers.

The halves are apart so that the inputs of each linear can be looked at before the linear is
quantised. Knows no cache beyond the layer at hand, no request, no method.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from engine_actor import ops
from engine_actor.model.config import ModelConfig
from engine_actor.model.decoder import DecoderLayer, build_layer
from engine_actor.model.layer_ops import choose_ops
from engine_actor.model.layers.attention import StepTensors
from engine_actor.model.layers.rope import Rotary
from engine_actor.quant.stream import Dense

PASS_TOKENS = 2048
"""Tokens of one pass through a layer: bounds the activations that exist at once."""
BLOCK_TOKENS = 16


class PlainLinear:
    """y = x @ weight.T + bias in fp32; without a weight y = x. Stands in for an ops.Linear."""

    gated = False

    def __init__(self, dense: Dense | None = None) -> None:
        self._weight = None if dense is None else dense.weight
        bias = None if dense is None else dense.bias
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._weight is None:
            return x
        return torch.nn.functional.linear(x, self._weight, self._bias)


def linear(dense: Dense) -> ops.Linear:
    """y = x @ weight.T + bias in fp32."""
    return cast(ops.Linear, PlainLinear(dense))


class LayerForward:
    """Runs the halves of a layer over sequences of `length` tokens, fp32.

    Rows are [sequences * length, width]. Sequences attend to themselves only, from position 0.
    """

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        self._config = config
        self._length = length
        self._device = device
        self._ops = choose_ops(exact=False)
        self._rotary = Rotary(config, device)
        self._rotary.reach(length)
        self._layout = ops.HeadLayout(config.n_heads, config.n_kv_heads, config.head_dim**-0.5)
        self._steps: dict[int, tuple[StepTensors, torch.Tensor]] = {}

    def chunks(self, sequences: int) -> Iterator[slice]:
        """Slices of sequences that make one pass each."""
        step = max(1, PASS_TOKENS // self._length)
        for first in range(0, sequences, step):
            yield slice(first, min(first + step, sequences))

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of rows."""
        return self._ops.rows.norm(weight.float(), self._config.rms_eps)(x)

    def attended(
        self, normed: torch.Tensor, norms: dict[str, torch.Tensor], qkv: Dense
    ) -> torch.Tensor:
        """What `o` gets to see: rows [T, heads * head_dim] of normed rows [T, hidden]."""
        step, cache = self._step(normed.shape[0] // self._length)
        return self._layer(norms, qkv).attention(normed, cache, step)

    def activated(self, gate_up_rows: torch.Tensor) -> torch.Tensor:
        """What `down` gets to see: silu(gate) * up."""
        return self._ops.rows.silu_mul(gate_up_rows)

    def _layer(self, norms: dict[str, torch.Tensor], qkv: Dense) -> DecoderLayer:
        linears: dict[str, ops.Linear] = {"qkv": linear(qkv)}
        for name in ("o", "gate_up", "down"):
            linears[name] = cast(ops.Linear, PlainLinear())
        wide = {name: weight.float() for name, weight in norms.items()}
        return build_layer(self._config, self._ops, linears, wide)

    def _step(self, sequences: int) -> tuple[StepTensors, torch.Tensor]:
        """Positions, slots and an empty cache for so many sequences side by side."""
        if sequences not in self._steps:
            self._steps = {sequences: self._make_step(sequences)}
        return self._steps[sequences]

    def _make_step(self, sequences: int) -> tuple[StepTensors, torch.Tensor]:
        config, length = self._config, self._length
        per = -(-length // BLOCK_TOKENS)
        lengths = [length] * sequences
        blocks = [range(i * per, (i + 1) * per) for i in range(sequences)]
        slots = [i * per * BLOCK_TOKENS + p for i in range(sequences) for p in range(length)]
        attend = ops.plan_attention(
            lengths, lengths, blocks, BLOCK_TOKENS, self._device, config.sliding_window
        )
        positions = torch.arange(length, device=self._device).repeat(sequences)
        rotate = self._ops.rows.rotation(*self._rotary.at(positions, torch.float32), self._layout)
        write = ops.plan_write(torch.tensor(slots, device=self._device), slots)
        shape = (sequences * per, BLOCK_TOKENS, 2, config.n_kv_heads, config.head_dim)
        return StepTensors(rotate, write, attend), torch.zeros(shape, device=self._device)
