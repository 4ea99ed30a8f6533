"""One layer of a conversion: look at the inputs of each linear in turn, round it, go on with it.

Sequential within the layer too: `o` is calibrated on what the rounded `qkv` gives, and so on. Knows
hidden states and weights of one layer, no file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine_actor.ops import PackedLinear
from engine_actor.quant.calibrate import InputMoments
from engine_actor.quant.forward import LayerForward, linear
from engine_actor.quant.grid import Grid
from engine_actor.quant.recipe import Method
from engine_actor.quant.rounding import round_linear
from engine_actor.quant.stream import LayerWeights

KEPT_BYTES = 1 << 30
"""Inputs of a half's second linear are kept up to this size, else computed a second time."""

Inner = Callable[[torch.Tensor, LayerWeights], torch.Tensor]
"""(rows of the residual stream [T, hidden], weights) -> the input of a half's second linear."""


class LayerPass:
    """Rounds the linears of one layer and moves hidden states through layers, fp32, one device.

    hidden: fp32 [S, T, hidden], S token sequences before the layer.
    """

    def __init__(self, forward: LayerForward, method: Method, device: torch.device) -> None:
        self._forward = forward
        self._method = method
        self._device = device

    def round_layer(
        self, source: LayerWeights, grids: dict[str, Grid], hidden: torch.Tensor | None
    ) -> tuple[dict[str, PackedLinear], LayerWeights, dict[str, float]]:
        """(packed linears, the layer as they make it, relative error of each linear's output).

        Moves `hidden`, the calibration text, behind the layer in place. None: every linear is
        rounded from its weights alone.
        """
        packed: dict[str, PackedLinear] = {}
        errors: dict[str, float] = {}
        linears = dict(source.linears)
        now = LayerWeights(linears, source.norms)

        def settle(short: str, moments: InputMoments | None) -> None:
            rounded = round_linear(linears[short], grids[short], self._method, moments)
            packed[short], linears[short] = rounded.packed, rounded.dense
            errors[short] = rounded.error

        halves = (("qkv", "o", self._attention), ("gate_up", "down", self._mlp))
        for first, second, inner in halves:
            if hidden is None:
                settle(first, None)
                settle(second, None)
                continue
            settle(first, self._first_moments(hidden, now, first))
            kept = self._kept(hidden, linears[second].weight.shape[1])
            settle(second, self._second_moments(hidden, now, second, inner, kept))
            self._advance_half(hidden, now, second, inner, kept)
        return packed, now, errors

    def advance(self, hidden: torch.Tensor, weights: LayerWeights) -> None:
        """Move hidden through a layer in place."""
        self._advance_half(hidden, weights, "o", self._attention, None)
        self._advance_half(hidden, weights, "down", self._mlp, None)

    def input_squares(self, hidden: torch.Tensor, weights: LayerWeights) -> dict[str, torch.Tensor]:
        """Mean square of each input of each linear, [K] by short name. hidden stays as it is."""
        rows = self._rows(hidden)
        found = {}
        halves = (("qkv", "o", self._attention), ("gate_up", "down", self._mlp))
        for first, second, inner in halves:
            norm = weights.norms["attn_norm" if first == "qkv" else "mlp_norm"]
            x = inner(rows, weights)
            found[first] = self._forward.norm(rows, norm).square().mean(0)
            found[second] = x.square().mean(0)
            rows = rows + linear(weights.linears[second])(x)
        return found

    def _rows(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.reshape(-1, hidden.shape[-1]).to(self._device)

    def _attention(self, rows: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        normed = self._forward.norm(rows, weights.norms["attn_norm"])
        return self._forward.attended(normed, weights.norms, weights.linears["qkv"])

    def _mlp(self, rows: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        normed = self._forward.norm(rows, weights.norms["mlp_norm"])
        return self._forward.activated(linear(weights.linears["gate_up"])(normed))

    def _kept(self, hidden: torch.Tensor, columns: int) -> dict[int, torch.Tensor] | None:
        """Where to keep a second linear's inputs, by first sequence; None where too many."""
        size = hidden.shape[0] * hidden.shape[1] * columns * hidden.element_size()
        return {} if size <= KEPT_BYTES else None

    def _first_moments(
        self, hidden: torch.Tensor, now: LayerWeights, short: str
    ) -> InputMoments | None:
        """Of the normed residual stream."""
        if not self._method.needs_inputs:
            return None
        moments = InputMoments(now.linears[short].weight.shape[1], self._device)
        norm = now.norms["attn_norm" if short == "qkv" else "mlp_norm"]
        for part in self._forward.chunks(hidden.shape[0]):
            moments.add(self._forward.norm(self._rows(hidden[part]), norm))
        return moments

    def _second_moments(
        self,
        hidden: torch.Tensor,
        now: LayerWeights,
        short: str,
        inner: Inner,
        kept: dict[int, torch.Tensor] | None,
    ) -> InputMoments | None:
        """Of what attention or the activation gives; keeps it where there is room."""
        if not self._method.needs_inputs:
            return None
        moments = InputMoments(now.linears[short].weight.shape[1], self._device)
        for part in self._forward.chunks(hidden.shape[0]):
            rows = self._rows(hidden[part])
            x = inner(rows, now)
            if kept is not None:
                kept[part.start] = x
            moments.add(x)
        return moments

    def _advance_half(
        self,
        hidden: torch.Tensor,
        weights: LayerWeights,
        second: str,
        inner: Inner,
        kept: dict[int, torch.Tensor] | None,
    ) -> None:
        out = linear(weights.linears[second])
        for part in self._forward.chunks(hidden.shape[0]):
            rows = self._rows(hidden[part])
            x = kept.pop(part.start) if kept else inner(rows, weights)
            hidden[part] = (rows + out(x)).view(hidden[part].shape).to(hidden.device)
