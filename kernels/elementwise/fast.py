"""The quickest row ops on a CPU by measurement (docs/log.md), right on any device.

For one row an op costs its dispatch, not its arithmetic: what counts is how few there are.
"""

from __future__ import annotations

import math

import torch

from kernels.elementwise.op import AddNormFn, HeadLayout, RowFn, add_norm_of

_silu = torch.nn.functional.silu


class FastRows:
    """Few ops a row."""

    def norm(self, weight: torch.Tensor, eps: float) -> RowFn:
        return _cpu_norm(weight, eps) if weight.device.type == "cpu" else _norm(weight, eps)

    def add_norm(self, weight: torch.Tensor, eps: float) -> AddNormFn:
        return add_norm_of(self.norm(weight, eps))

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor, heads: HeadLayout) -> RowFn:
        # Angles for every head, the values' being none: no slicing and joining in the layers.
        shape = (cos.shape[0], heads.queries + 2 * heads.kv, cos.shape[2])
        wide_cos, wide_sin = cos.repeat(1, shape[1], 1), sin.repeat(1, shape[1], 1)
        wide_cos[:, -heads.kv :], wide_sin[:, -heads.kv :] = 1.0, 0.0
        wide_cos[:, : heads.queries] *= heads.query_scale
        wide_sin[:, : heads.queries] *= heads.query_scale
        half = shape[2] // 2

        def run(rows: torch.Tensor) -> torch.Tensor:
            rows = rows.to(wide_cos.dtype)
            return torch.addcmul(rows * wide_cos, rows.roll(half, -1), wide_sin)

        return run

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _silu(gate).mul_(up)


def _norm(weight: torch.Tensor, eps: float) -> RowFn:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

    return run


def _cpu_norm(weight: torch.Tensor, eps: float) -> RowFn:
    """sqrt(mean + eps) = hypot(norm, sqrt(width * eps)) / sqrt(width), four ops."""
    width = weight.shape[0]
    scaled = weight.float() * math.sqrt(width)
    floor = torch.tensor(math.sqrt(width * eps))

    def run(x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x * scaled).div_(torch.hypot(length, floor))

    return run
