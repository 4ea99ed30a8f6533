"""What the inputs of one linear look like: their second moments over the calibration text.

Knows no layer and no grid.
"""

from __future__ import annotations

import torch

from engine_actor.quant.gptq import Curvature

FLOOR = 1e-6
"""Added to a mean square before dividing by it."""
TILE = 512
"""Columns of one product: of the symmetric sum only the upper tiles are computed."""


class InputMoments:
    """The sum of x x.T over rows x [T, K], each row counted by its weight."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self._sum = torch.zeros(columns, columns, device=device)
        self._weight = 0.0

    def add(self, x: torch.Tensor, stream: torch.Tensor | None = None) -> None:
        """Add rows [T, K]. stream [T, hidden]: what this linear's output is added to; a row then
        weighs 1 / mean square of its stream, since a norm follows that divides by just that.
        """
        if stream is None:
            self._weight += x.shape[0]
        else:
            weight = 1.0 / (stream.square().mean(-1, keepdim=True) + FLOOR)
            self._weight += float(weight.sum())
            x = x * weight.sqrt()
        for first in range(0, x.shape[1], TILE):
            tile = slice(first, first + TILE)
            self._sum[tile, first:].addmm_(x[:, tile].t(), x[:, first:])

    def mean_square(self) -> torch.Tensor:
        """[K]: of each input."""
        return self._sum.diagonal() / max(self._weight, FLOOR)

    def hessian(self) -> torch.Tensor:
        """The mean of x x.T, [K, K]. Takes the sums with it: call it last."""
        total = self._sum.div_(max(self._weight, FLOOR))
        for first in range(0, total.shape[1], TILE):
            last = first + TILE
            total[last:, first:last] = total[first:last, last:].t()
        return total

    def curvature(self, damp: float) -> Curvature:
        """The mean Hessian made ready for GPTQ. Takes the sums with it: call it last."""
        return Curvature.of(self.hessian(), damp)
