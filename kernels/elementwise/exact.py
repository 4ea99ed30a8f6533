"""Batch-invariant row ops: the same row gives the same bits in any batch.

Products, sums and quotients of two numbers are correctly rounded wherever they are computed. Sums
over a row run in tiles of a fixed shape. exp is not correctly rounded and its vector and scalar
forms differ, so the activation goes row by row: a column then always takes one form.
"""

from __future__ import annotations

import torch

from kernels.elementwise.op import AddNormFn, HeadLayout, RowFn, add_norm_of

TILE_ROWS = 16

_silu = torch.nn.functional.silu


class ExactRows:
    """fp32 in, fp32 out."""

    def norm(self, weight: torch.Tensor, eps: float) -> RowFn:
        def run(x: torch.Tensor) -> torch.Tensor:
            means = mean_squares(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)
            return x / (means + eps).sqrt() * weight

        return run

    def add_norm(self, weight: torch.Tensor, eps: float) -> AddNormFn:
        return add_norm_of(self.norm(weight, eps))

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor, heads: HeadLayout) -> RowFn:
        rotated, half = heads.queries + heads.kv, cos.shape[2] // 2

        def run(rows: torch.Tensor) -> torch.Tensor:
            turning = rows[:, :rotated]
            # Not addcmul: fused in vector code, perhaps not in the scalar rest.
            turned = turning * cos + turning.roll(half, -1) * sin
            turned[:, : heads.queries] *= heads.query_scale
            return torch.cat((turned, rows[:, rotated:]), dim=1)

        return run

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.stack([_silu(row.contiguous()) for row in gate.unbind(0)]) * up


def mean_squares(rows: torch.Tensor) -> torch.Tensor:
    """[M, width] -> [M, 1], summed in tiles of exactly TILE_ROWS rows."""
    count = rows.shape[0]
    short = -count % TILE_ROWS
    padded = torch.cat((rows, rows.new_zeros(short, rows.shape[1]))) if short else rows
    means = [(tile * tile).mean(-1, keepdim=True) for tile in padded.split(TILE_ROWS)]
    return torch.cat(means)[:count]
