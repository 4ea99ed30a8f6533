"""Scales (and offsets) of every group by search: candidates of both signs, then least squares.

The error of a weight counts as much as its `importance`: 1 for plain MSE, the mean square of its
input for activation-aware search, the curvature GPTQ leaves for GPTQ (gptq.py). Knows no Hessian.
"""

from __future__ import annotations

import torch

from engine_actor.quant.grid import Grid, Steps, codes_of, grouped, half, half_scale, values_of

SHRINKS = tuple(0.45 + 0.05 * i for i in range(12))
"""Candidate scales, as shares of the one that loses no value to clipping."""
SHIFTS = (-0.15, -0.075, 0.0, 0.075, 0.15)
"""Candidate centres of a grid with offsets, as shares of half the range."""
REFITS = 2
CHUNK_VALUES = 1 << 16
"""Values of one pass of the search: they and their candidates stay in a core's cache."""
GPU_CHUNK_VALUES = 1 << 24
"""A GPU wants long passes instead."""


def absmax_steps(weight: torch.Tensor, grid: Grid) -> Steps:
    """The plain rule: the largest magnitude of a group is the largest code. weight fp32 [N, K]."""
    if grid.offsets:
        groups = grouped(weight, grid.width(weight.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = half_scale((high - low) / (grid.high - grid.low))
        return Steps(scales, half(low - grid.low * scales))
    largest = grouped(weight, grid.width(weight.shape[1])).abs().amax(-1)
    return Steps(half_scale(largest / grid.high), None)


def search_steps(weight: torch.Tensor, grid: Grid, importance: torch.Tensor | None = None) -> Steps:
    """The best steps found for weight fp32 [N, K]; importance [K], None for all equal."""
    columns = weight.shape[1]
    width = grid.width(columns)
    ones = torch.ones(columns, device=weight.device)
    marks = grouped((ones if importance is None else importance).view(1, -1), width)
    find = _search_offset if grid.offsets else _search_scale
    step = max(1, (CHUNK_VALUES if weight.device.type == "cpu" else GPU_CHUNK_VALUES) // columns)
    found = [find(grouped(part, width), marks, grid) for part in weight.split(step)]
    scales = torch.cat([scale for scale, _ in found])
    offsets = [offset for _, offset in found if offset is not None]
    return Steps(scales, torch.cat(offsets) if offsets else None)


class _Best:
    """The candidate with the least error of each group; ties keep the earlier one."""

    def __init__(self, values: torch.Tensor, importance: torch.Tensor, grid: Grid) -> None:
        self._values, self._importance, self._grid = values, importance, grid
        shape = (*values.shape[:2], 1)
        self._error = torch.full(shape, torch.inf, device=values.device)
        self.scale = torch.ones(shape, device=values.device)
        self.offset = torch.zeros(shape, device=values.device) if grid.offsets else None

    def offer(self, scale: torch.Tensor, offset: torch.Tensor | None = None) -> None:
        codes = codes_of(self._values, scale, offset, self._grid)
        miss = values_of(codes, scale, offset).sub_(self._values)
        error = miss.square_().mul_(self._importance).sum(-1, keepdim=True)
        better = error < self._error
        self._error = torch.where(better, error, self._error)
        self.scale = torch.where(better, scale, self.scale)
        if offset is not None and self.offset is not None:
            self.offset = torch.where(better, offset, self.offset)

    def codes(self) -> torch.Tensor:
        return codes_of(self._values, self.scale, self.offset, self._grid)


def _search_scale(
    values: torch.Tensor, importance: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, None]:
    """values [N, G, width], importance [1, G, width] -> scales [N, G]."""
    best = _Best(values, importance, grid)
    largest = values.abs().amax(-1, keepdim=True) / grid.high
    for share in SHRINKS:
        for sign in (1.0, -1.0):
            best.offer(half_scale(largest * (sign * share)))
    for _ in range(REFITS):
        codes = best.codes()
        weighted = codes * importance
        fit = (weighted * values).sum(-1, keepdim=True)
        best.offer(half_scale(fit / (weighted * codes).sum(-1, keepdim=True).clamp_min(1e-12)))
    return best.scale[..., 0], None


def _search_offset(
    values: torch.Tensor, importance: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """values [N, G, width], importance [1, G, width] -> scales, offsets [N, G]."""
    best = _Best(values, importance, grid)
    # The padding of a short last group holds zeros that are no weights.
    real = importance > 0
    low = torch.where(real, values, torch.inf).amin(-1, keepdim=True)
    high = torch.where(real, values, -torch.inf).amax(-1, keepdim=True)
    low, high = torch.nan_to_num(low, posinf=0.0), torch.nan_to_num(high, neginf=0.0)
    centre, reach = (low + high) / 2, (high - low) / 2
    for share in SHRINKS:
        for shift in SHIFTS:
            scale = half_scale(2 * reach * share / (grid.high - grid.low))
            start = centre + shift * reach - share * reach
            best.offer(scale, half(start - grid.low * scale))
    total = importance.sum(-1, keepdim=True).clamp_min(1e-12)
    for _ in range(REFITS + 1):
        codes = best.codes()
        middle = (importance * codes).sum(-1, keepdim=True) / total
        mean = (importance * values).sum(-1, keepdim=True) / total
        weighted = importance * (codes - middle)
        slope = (weighted * (values - mean)).sum(-1, keepdim=True)
        scale = half_scale(
            slope / (weighted * (codes - middle)).sum(-1, keepdim=True).clamp_min(1e-12)
        )
        best.offer(scale, half(mean - scale * middle))
    assert best.offset is not None
    return best.scale[..., 0], best.offset[..., 0]
