"""Row-wise ops between the linears: RMS norm, rotary embedding, gated SiLU.

`*_reference` are the definitions in fp32. A RowOps is one consistent way to run them: fast.py or
exact.py. Each takes rows [T, ...] and never looks across rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

RowFn = Callable[[torch.Tensor], torch.Tensor]
AddNormFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, delta) -> norm of x + delta; x has become x + delta."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A row of projected heads: `queries`, then `kv` keys, then `kv` values. query_scale is the
    attention's 1 / sqrt(head_dim), put on the queries once instead of on every score.
    """

    queries: int
    kv: int
    query_scale: float


class RowOps(Protocol):
    """One consistent set of row-wise ops, fast or exact."""

    def norm(self, weight: torch.Tensor, eps: float) -> RowFn:
        """x -> x / sqrt(mean(x^2) + eps) * weight over the last axis, prepared once. weight 1-D."""
        ...

    def add_norm(self, weight: torch.Tensor, eps: float) -> AddNormFn:
        """norm() behind a residual add: `delta` is added to x in place, in x's dtype, and the norm
        of the sum is returned.
        """
        ...

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor, heads: HeadLayout) -> RowFn:
        """Rotary embedding at the positions of one forward, prepared once for all its layers.

        cos, sin [T, 1, head_dim]; sin carries the sign of the first half. The function takes
        [T, queries + 2 * kv, head_dim] (queries, keys, values) and returns the same in the dtype of
        cos: queries rotated and scaled, keys rotated, values as they were. It may reuse its input.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of rows [T, 2 * I] that hold gate, then up."""
        ...


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 definition."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def add_norm_of(norm: RowFn) -> AddNormFn:
    """add_norm() in two steps, for a set of ops that has no better way."""

    def run(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        x += delta
        return norm(x)

    return run


def rotation_reference(
    rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: HeadLayout
) -> torch.Tensor:
    """fp32 definition: pairs (i, i + head_dim / 2) turn by their position's angle."""
    half, rotated = rows.shape[-1] // 2, heads.queries + heads.kv
    out = rows.float().clone()
    first, second = out[:, :rotated, :half].clone(), out[:, :rotated, half:].clone()
    c, s = cos[..., :half].float(), sin[..., half:].float()
    out[:, :rotated, :half] = first * c - second * s
    out[:, :rotated, half:] = second * c + first * s
    out[:, : heads.queries] *= heads.query_scale
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """fp32 definition."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
