"""Weights on a grid as a differentiable function of latent weights, scales and offsets.

Straight-through: forwards everything is rounded to what will be stored, backwards as if it were
not. One function instead of a chain of operations: a step of tuning is thousands of launches, and
each that autograd need not record is memory and time. Knows no layer.
"""

from __future__ import annotations

from typing import Any

import torch

from engine_actor.quant.grid import Grid, grouped, half, half_scale


def scales_at(start: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """[N, G]: the fp16 numbers that start * (1 + change) is rounded to, as fp32."""
    return half_scale(start * (1 + change))


def offsets_at(
    offsets: torch.Tensor | None, start: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor | None:
    """[N, G]: likewise offsets + start * shift, `shift` being in steps of the grid."""
    return None if offsets is None else half(offsets + start * shift)


def codes_at(latent: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The nearest codes, in the latent's own dtype."""
    return latent.round().clamp_(grid.low, grid.high)


class Gridded(torch.autograd.Function):
    """fp32 [N, K]: code * scale, plus offset where there are any.

    latent fp32 or int8 [N, K], of which only the first is trained; start, change, shift and offsets
    fp32 [N, G], see scales_at and offsets_at.
    """

    @staticmethod
    def forward(
        ctx: Any,
        latent: torch.Tensor,
        change: torch.Tensor,
        shift: torch.Tensor,
        start: torch.Tensor,
        offsets: torch.Tensor | None,
        grid: Grid,
    ) -> torch.Tensor:
        codes = codes_at(latent, grid) if latent.is_floating_point() else latent.float()
        rows, columns = codes.shape
        width = grid.width(columns)
        scales = scales_at(start, change)
        ctx.grid = grid
        ctx.save_for_backward(codes.to(torch.int8), scales, start)
        values = grouped(codes, width) * scales.unsqueeze(-1)
        moved = offsets_at(offsets, start, shift)
        if moved is not None:
            values += moved.unsqueeze(-1)
        return values.view(rows, -1)[:, :columns]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes, scales, start = ctx.saved_tensors
        rows, columns = codes.shape
        width = ctx.grid.width(columns)
        slope = grouped(grads[0], width)
        latent = change = shift = None
        if ctx.needs_input_grad[0]:
            # Contiguous where a last group is short too: a fused optimiser takes nothing else.
            latent = (slope * scales.unsqueeze(-1)).view(rows, -1)[:, :columns].contiguous()
        if ctx.needs_input_grad[1]:
            change = (slope * grouped(codes, width)).sum(-1) * start
        if ctx.needs_input_grad[2]:
            shift = slope.sum(-1) * start
        return latent, change, shift, None, None, None
