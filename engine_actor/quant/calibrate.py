"""What the inputs of one linear look like: their second moments over the calibration text.

Knows no layer and no grid.
"""

from __future__ import annotations

import torch

from engine_actor.quant.gptq import Curvature

TILE = 512
"""Columns of one product: of the symmetric sum only the upper tiles are computed."""


class InputMoments:
    """The sum of x x.T over rows x [T, K]."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self._sum = torch.zeros(columns, columns, device=device)
        self._rows = 0

    def add(self, x: torch.Tensor) -> None:
        """Add rows [T, K]."""
        self._rows += x.shape[0]
        for first in range(0, x.shape[1], TILE):
            tile = slice(first, first + TILE)
            self._sum[tile, first:].addmm_(x[:, tile].t(), x[:, first:])

    def mean_square(self) -> torch.Tensor:
        """[K]: of each input."""
        return self._sum.diagonal() / max(self._rows, 1)

    def hessian(self) -> torch.Tensor:
        """The mean of x x.T, [K, K]. Takes the sums with it: call it last."""
        total = self._sum.div_(max(self._rows, 1))
        for first in range(0, total.shape[1], TILE):
            last = first + TILE
            total[last:, first:last] = total[first:last, last:].t()
        return total

    def curvature(self, damp: float) -> Curvature:
        """The mean Hessian made ready for GPTQ. Takes the sums with it: call it last."""
        return Curvature.of(self.hessian(), damp)
