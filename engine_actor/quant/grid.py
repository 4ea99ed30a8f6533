"""The grid a group of weights is rounded to: codes of `bits`, an fp16 scale, perhaps an offset.

w = scale * q, or scale * q + offset, q in two's complement. A scale may be negative: the one code
more that the negative side has then serves whichever tail is longer. Knows no method.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMALLEST = 2.0**-20
"""Scales below it have too few bits left as fp16 subnormals; weights that small are noise."""
LARGEST = 65504.0


@dataclass(frozen=True, slots=True)
class Grid:
    """bits 3, 4 or 8; group: values of K that share a scale, -1 for the whole row; offsets: whether
    each group has an offset too.
    """

    bits: int
    group: int
    offsets: bool = False

    @property
    def low(self) -> int:
        """Smallest code."""
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """Largest code."""
        return (1 << (self.bits - 1)) - 1

    def width(self, columns: int) -> int:
        """Values in a full group."""
        return columns if self.group == -1 else min(self.group, columns)

    def groups(self, columns: int) -> int:
        """G; the last group may be short."""
        return -(-columns // self.width(columns))

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a packed linear [rows, columns] without its bias."""
        per_group = 4 if self.offsets else 2
        codes = -(-columns * self.bits // 8)
        return rows * (codes + per_group * self.groups(columns))

    def bits_per_weight(self, rows: int, columns: int) -> float:
        """Everything stored, divided by the weights it stands for."""
        return 8 * self.nbytes(rows, columns) / (rows * columns)


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Scales and offsets of one linear: fp32 [N, G] that are fp16 numbers; offsets or None."""

    scales: torch.Tensor
    offsets: torch.Tensor | None

    def per_column(self, columns: int, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(scales, offsets) [N, columns]."""
        return spread(self.scales, columns, width), (
            None if self.offsets is None else spread(self.offsets, columns, width)
        )


def spread(values: torch.Tensor, columns: int, width: int) -> torch.Tensor:
    """[N, G] -> [N, columns]."""
    return values.repeat_interleave(width, dim=1)[:, :columns]


def half(values: torch.Tensor) -> torch.Tensor:
    """The nearest fp16 numbers, as fp32; too large ones become the largest."""
    return values.clamp(-LARGEST, LARGEST).to(torch.float16).to(torch.float32)


def half_scale(values: torch.Tensor) -> torch.Tensor:
    """As half(), and never so small that dividing by it means nothing."""
    sign = torch.where(values < 0, -1.0, 1.0)
    return half(sign * values.abs().clamp_min(SMALLEST))


def codes_of(
    weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, grid: Grid
) -> torch.Tensor:
    """Nearest codes, as fp32. scale and offset broadcast against weight."""
    shifted = weight if offset is None else weight - offset
    return torch.round(shifted / scale).clamp_(grid.low, grid.high)


def values_of(
    codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None
) -> torch.Tensor:
    """What the codes mean."""
    return codes * scale if offset is None else codes * scale + offset


def grouped(values: torch.Tensor, width: int) -> torch.Tensor:
    """[N, K] -> [N, G, width], zeros after K."""
    short = -values.shape[1] % width
    padded = torch.nn.functional.pad(values, (0, short)) if short else values
    return padded.reshape(values.shape[0], -1, width)
