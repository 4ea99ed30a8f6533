"""Row-wise ops between the linears: RMS norm, rotary embedding, gated SiLU.

`*_reference` are the definitions in fp32; the others are the ways to run them. Each takes rows
[T, ...] and never looks across rows.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

_silu = torch.nn.functional.silu


class RowOps(Protocol):
    """One consistent set of row-wise ops, fast or exact."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
        ...

    def rotate(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotated: int
    ) -> torch.Tensor:
        """Rotary embedding of heads[:, :rotated] ([T, H, head_dim]); the other heads (values) pass.
        cos, sin [T, 1, head_dim]; sin carries the sign of the first half. Returns the dtype of cos.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of rows [T, 2 * I] that hold gate, then up."""
        ...


class FastRows:
    """The quickest on a CPU by measurement (docs/log.md), right on any device."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.device.type != "cpu" or x.ndim > 2:
            return torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        # torch's own rms_norm is seven small ops on a CPU; a norm, a hypot and a division are three.
        width = weight.shape[0]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        floor = norm.new_tensor(math.sqrt(width * eps))
        return (x * weight).div_(torch.hypot(norm, floor)).mul_(math.sqrt(width))

    def rotate(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotated: int
    ) -> torch.Tensor:
        out = torch.empty(heads.shape, dtype=cos.dtype, device=heads.device)
        turning = heads[:, :rotated]
        swapped = turning.roll(turning.shape[-1] // 2, -1)
        torch.addcmul(turning * cos, swapped, sin, out=out[:, :rotated])
        out[:, rotated:] = heads[:, rotated:]
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _silu(gate).mul_(up)


class ExactRows:
    """Batch-invariant: the same row gives the same bits in any batch.

    Products, sums and quotients of two numbers are correctly rounded wherever they are computed.
    Sums over a row run in tiles of a fixed shape; exp is not correctly rounded and its vector and
    scalar forms differ, so the activation goes row by row: a column then always takes one form.
    """

    tile_rows = 16

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        short = -rows.shape[0] % self.tile_rows
        padded = torch.cat((rows, rows.new_zeros(short, rows.shape[1]))) if short else rows
        tiles = padded.split(self.tile_rows)
        means = torch.cat([(tile * tile).mean(-1, keepdim=True) for tile in tiles])
        means = means[: rows.shape[0]]
        return (rows / (means + eps).sqrt() * weight).view(x.shape)

    def rotate(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotated: int
    ) -> torch.Tensor:
        turning = heads[:, :rotated]
        swapped = turning.roll(turning.shape[-1] // 2, -1)
        # Not addcmul: fused in vector code, perhaps not in the scalar rest.
        return torch.cat((turning * cos + swapped * sin, heads[:, rotated:]), dim=1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.stack([_silu(row.contiguous()) for row in gate.unbind(0)]) * up


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 definition."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rotate_reference(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotated: int
) -> torch.Tensor:
    """fp32 definition: pairs (i, i + head_dim / 2) turn by their position's angle."""
    half = heads.shape[-1] // 2
    out = heads.float().clone()
    first, second = out[:, :rotated, :half].clone(), out[:, :rotated, half:].clone()
    c, s = cos[..., :half].float(), sin[..., half:].float()
    out[:, :rotated, :half] = first * c - second * s
    out[:, :rotated, half:] = second * c + first * s
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """fp32 definition."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
