"""A rounded model whose steps, norms and, where wanted, codes can be trained, in plain torch.

What the layout fixes stays fixed: every weight is scale * code (+ offset) of fp16 scales and whole
codes also while training, the gradient passes through both roundings (straight-through). Layers are
recomputed backwards, so that one layer's activations exist at once. Knows no text and no optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from engine_actor.model.config import ModelConfig
from engine_actor.ops import PackedLinear, dequantise, moved, pack_codes
from engine_actor.quant.grid import Grid, grouped
from engine_actor.quant.gridded import Gridded, codes_at, offsets_at, scales_at
from engine_actor.quant.plain_decoder import Places, decoder_layer, norm
from engine_actor.quant.stream import LINEARS

EDGE = 0.49
"""How far beyond the last code a latent weight may go: half a step is where codes change."""
START = 0.3
"""How far from its code a latent weight may start. GPTQ takes a code other than the nearest for
many weights; set as close to the change as they can be, those would all flip in the first steps.
"""
LOGITS_AT_ONCE = 1 << 28
"""Logits that exist at once, of each of two models: 1 GiB as fp32."""


def _passed(rounded: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`rounded` forwards, the gradient of `values` backwards."""
    return values + (rounded - values).detach()


class TrainableLinear:
    """One linear. change [N, G]: of its scales, relative. shift [N, G]: of its offsets, in steps.
    latent fp32 [N, K]: what its codes are the nearest to, in steps; None where codes stay.
    """

    def __init__(
        self, packed: PackedLinear, source: torch.Tensor | None, device: torch.device
    ) -> None:
        """source fp32 [N, K]: the weights before rounding, where the codes are to be trained."""
        self._packed = packed
        self._grid = Grid(packed.bits, packed.group, packed.offsets is not None)
        self._scales = packed.scales.to(device).float()
        self._offsets = None if packed.offsets is None else packed.offsets.to(device).float()
        self._bias = None if packed.bias is None else packed.bias.to(device).float()
        ones = torch.ones_like(packed.scales)
        plain = replace(packed, scales=ones, offsets=None, bias=None)
        codes = dequantise(moved(plain, device))
        self.change = torch.zeros_like(self._scales, requires_grad=True)
        self.shift = torch.zeros_like(self._scales, requires_grad=self._grid.offsets)
        self._codes: torch.Tensor | None = None
        self.latent: torch.Tensor | None = None
        if source is None:
            self._codes = codes.to(torch.int8)
            return
        width = self._grid.width(codes.shape[1])
        shifted = grouped(source, width)
        if self._offsets is not None:
            shifted = shifted - self._offsets.unsqueeze(-1)
        wish = (shifted / self._scales.unsqueeze(-1)).reshape(codes.shape[0], -1)
        miss = (wish[:, : codes.shape[1]] - codes).clamp_(-START, START)
        self.latent = (codes + miss).requires_grad_()

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(kind, leaf) of all that is trained."""
        yield "scales", self.change
        if self._grid.offsets:
            yield "offsets", self.shift
        if self.latent is not None:
            yield "codes", self.latent

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        return linear(x, self.weight(), self._bias)

    def weight(self) -> torch.Tensor:
        """fp32 [N, K], exactly what packed() will mean."""
        latent = self._codes if self.latent is None else self.latent
        assert latent is not None
        weight = Gridded.apply(
            latent, self.change, self.shift, self._scales, self._offsets, self._grid
        )
        assert isinstance(weight, torch.Tensor)
        return weight

    @torch.no_grad()
    def confine(self) -> None:
        """Keep latent weights where a code can follow them."""
        if self.latent is not None:
            self.latent.clamp_(self._grid.low - EDGE, self._grid.high + EDGE)

    @torch.no_grad()
    def packed(self) -> PackedLinear:
        """As it stands now, on the CPU."""
        codes = self._codes if self.latent is None else codes_at(self.latent, self._grid)
        assert codes is not None
        scales = scales_at(self._scales, self.change)
        offsets = offsets_at(self._offsets, self._scales, self.shift)
        return replace(
            self._packed,
            qweight=pack_codes(codes.to(torch.int8), self._grid.bits).cpu(),
            scales=scales.to(torch.float16).cpu(),
            offsets=None if offsets is None else offsets.to(torch.float16).cpu(),
        )


class TrainableNorm:
    """One norm's weight [size], `change` relative to where it started; kept in its own dtype."""

    def __init__(self, weight: torch.Tensor, eps: float, device: torch.device) -> None:
        self._eps = eps
        self._dtype = weight.dtype
        self._start = weight.to(device).float()
        self.change = torch.zeros_like(self._start, requires_grad=True)

    def weight(self) -> torch.Tensor:
        """fp32, rounded to what will be stored."""
        wanted = self._start * (1 + self.change)
        return _passed(wanted.detach().to(self._dtype).float(), wanted)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension, fp32."""
        return norm(x, self.weight(), self._eps)

    def stored(self) -> torch.Tensor:
        """As it stands now, on the CPU."""
        return self.weight().detach().to(self._dtype).cpu()


class TrainableLayer:
    """One decoder layer over [S, T, hidden], by short names of linears and norms."""

    def __init__(
        self,
        config: ModelConfig,
        packed: Mapping[str, PackedLinear],
        source: Mapping[str, torch.Tensor],
        norms: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """source: weights [N, K] before rounding of the linears whose codes are to be trained."""
        self._config = config
        self.linears = {
            short: TrainableLinear(packed[short], source.get(short), device) for short in LINEARS
        }
        self.norms = {
            name: TrainableNorm(weight, config.rms_eps, device) for name, weight in norms.items()
        }

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(kind, leaf) of all that is trained."""
        for one in self.linears.values():
            yield from one.parameters()
        for each in self.norms.values():
            yield "norms", each.change

    def __call__(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """x [S, T, hidden] behind the layer."""
        return decoder_layer(self._config, self.linears, self.norms, x, places)


class TrainableModel:
    """All layers and the last norm; hidden states before layer 0 come from a fixed embedding."""

    def __init__(
        self,
        config: ModelConfig,
        layers: list[TrainableLayer],
        last: torch.Tensor,
        length: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self.layers = layers
        self.norm = TrainableNorm(last, config.rms_eps, device)
        self._places = Places.of(config, length, device)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(kind, leaf) of all that is trained, always in the same order."""
        for layer in self.layers:
            yield from layer.parameters()
        yield "norms", self.norm.change

    def confine(self) -> None:
        """After each step of an optimiser."""
        for layer in self.layers:
            for one in layer.linears.values():
                one.confine()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states before the head, normed, fp32 [S, T, hidden]."""
        # A GPU multiplies bf16 many times faster; sums and the residual stream stay fp32.
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
            for layer in self.layers:
                hidden = checkpoint(
                    layer, hidden, self._places, use_reentrant=False, preserve_rng_state=False
                )
            return self.norm(hidden)


def divergence(
    rows: torch.Tensor, head: torch.Tensor, their_rows: torch.Tensor, their_head: torch.Tensor
) -> torch.Tensor:
    """Summed KL of the source's next-token distributions to ours, nats, differentiable in `rows`.

    rows, their_rows fp32 [R, hidden]; heads fp32 [vocab, hidden].
    """
    step = max(1, LOGITS_AT_ONCE // head.shape[0])
    parts = [
        _Divergence.apply(ours, head, theirs, their_head)
        for ours, theirs in zip(rows.split(step), their_rows.split(step), strict=True)
    ]
    return torch.stack(parts).sum()


class _Divergence(torch.autograd.Function):
    """The gradient, (p_ours - p_source) @ head, is made with the value, so no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        head: torch.Tensor,
        their_rows: torch.Tensor,
        their_head: torch.Tensor,
    ) -> torch.Tensor:
        ours = torch.log_softmax(rows @ head.t(), -1)
        theirs = torch.log_softmax(their_rows @ their_head.t(), -1)
        wanted = theirs.exp()
        total = (wanted * theirs.sub_(ours)).sum()
        ctx.save_for_backward(ours.exp_().sub_(wanted) @ head)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None, None
