"""Batch-invariant linear: the same row gives the same bits alone and in any batch.

fp32 weights; rows are multiplied in tiles of a fixed size, so every GEMM has the same shape, with
the last tile padded by zeros. That a row's place in the tile does not change its bits is a
property of the GEMM underneath, so it is tried at load on the layer's own weights; where it does
not hold, rows are multiplied one by one.
"""

from __future__ import annotations

import torch

from kernels.linear.weights import LinearFn, Weights, dense_weight
from kernels.spec.op import OpKey

TILE_ROWS = 16


class ExactTiles:
    """fp32 in, fp32 out."""

    name = "exact.tiles"

    def refuse(self, key: OpKey) -> str | None:
        return None if key.dtype == "float32" else "computes in fp32 only"

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        weight = dense_weight(weights).float().contiguous()
        bias = None if weights.bias is None else weights.bias.float()
        rows = TILE_ROWS if place_does_not_matter(weight) else 1

        def run(x: torch.Tensor) -> torch.Tensor:
            y = in_tiles(x, weight, rows)
            return y if bias is None else y.add_(bias)

        return run


def in_tiles(x: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """x [M, K] @ weight.T in GEMMs of exactly `rows` rows each."""
    count = x.shape[0]
    short = -count % rows
    if short:
        x = torch.cat((x, x.new_zeros(short, x.shape[1])))
    y = x.new_empty(x.shape[0], weight.shape[0])
    for first in range(0, x.shape[0], rows):
        torch.mm(x[first : first + rows], weight.T, out=y[first : first + rows])
    return y[:count]


def place_does_not_matter(weight: torch.Tensor) -> bool:
    """True where a row gives equal bits in every place of a tile of this weight's shape."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, weight.shape[1], generator=generator).to(weight.device)
    y = torch.mm(row.expand(TILE_ROWS, -1).contiguous(), weight.T)
    return bool((y == y[:1]).all())
