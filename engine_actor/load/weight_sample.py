"""A small sample of a packed linear, and the measures self_check.py compares. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine_actor.ops import PackedLinear, gather_rows

ROWS = 256
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_BACK = (0, 4, 1, 5, 2, 6, 3, 7)
_HALVES = tuple(range(0, 32, 2)) + tuple(range(1, 32, 2))
_MIXED = tuple(half * 16 + i for i in range(16) for half in (0, 1))
_BLOCKS = {
    "": (0,),
    "swapped": (1, 0),
    "reversed": tuple(range(7, -1, -1)),
    "bytes": (6, 7, 4, 5, 2, 3, 0, 1),
    "awq": _AWQ,
    "awq back": _AWQ_BACK,
    "halves": _HALVES,
    "mixed": _MIXED,
}
ORDERS = {
    "": "in order",
    "swapped": "swapped in pairs (the other nibble first)",
    "reversed": "reversed in eights (the highest nibble of a word first)",
    "bytes": "reversed by bytes (words of the other endianness)",
    "awq": "in the inverse of AWQ's order of eight",
    "awq back": "in AWQ's order of eight",
    "halves": "mixed from halves of 32 (GGUF's order undone)",
    "mixed": "in halves of 32 (GGUF's order)",
}
"""Orders that packers use within a word or block -> how codes look that this order would mend."""


@dataclass(frozen=True, slots=True)
class Sample:
    """weights f32[R, K]. shift: mean of w / s, in codes. coherence: by order of rows, how well
    large scales go with small codes, 0..1; empty where there is nothing to compare. columns
    f32[K]: log of their sizes.
    """

    weights: torch.Tensor
    shift: float
    coherence: dict[str, float]
    columns: torch.Tensor


def sample(layer: PackedLinear) -> Sample:
    """Runs of 32 neighbouring rows, ROWS in all, spread over the matrix."""
    count = layer.out_features
    runs = min(ROWS // 32, count // 32)
    if runs:
        starts = torch.linspace(0, count // 32 - 1, runs).long() * 32
        rows = (starts.unsqueeze(1) + torch.arange(32)).reshape(-1)
    else:
        rows = torch.arange(count)
    stored = gather_rows(replace(layer, perm=None), rows)
    scales = layer.scales.index_select(0, rows).float()
    groups, size = scales.shape[1], layer.group_size
    padded = torch.nn.functional.pad(stored, (0, groups * size - stored.shape[1]))
    grouped = padded.view(len(rows), groups, size)
    present = scales != 0
    divisor = torch.where(present, scales, torch.ones_like(scales)).unsqueeze(-1)
    codes = grouped / divisor
    # A short last group has zeros behind it: they count for neither sum nor number.
    shift = float(codes[present].sum()) / max(1, _filled(layer, present))
    weights = stored
    if layer.perm is not None:
        weights = torch.empty_like(stored)
        weights[:, layer.perm.long()] = stored
    columns = weights.square().mean(0).clamp(min=1e-20).log() / 2
    return Sample(weights, shift, _coherence(codes, scales, runs), columns)


def _filled(layer: PackedLinear, present: torch.Tensor) -> int:
    sizes = torch.full((present.shape[1],), layer.group_size)
    sizes[-1] = layer.in_features - (present.shape[1] - 1) * layer.group_size
    return int((present * sizes).sum())


def _coherence(codes: torch.Tensor, scales: torch.Tensor, runs: int) -> dict[str, float]:
    """For each order: the correlation, negated, of log scales with log code sizes, of what is left
    after the means of rows and of groups are taken away.
    """
    if not runs or scales.shape[1] < 2:
        return {}
    sizes = codes.square().mean(-1).clamp(min=1e-6).log() / 2
    large = scales.abs().clamp(min=1e-8).log()
    return {
        name: max(0.0, -correlation(_plain(reorder(sizes.T, name).T), _plain(large)))
        for name in ORDERS
    }


def _plain(values: torch.Tensor) -> torch.Tensor:
    return values - values.mean(1, keepdim=True) - values.mean(0) + values.mean()


def row_sizes(layer: PackedLinear) -> torch.Tensor:
    """Log of the rows' sizes by their scales alone, f32[N]; codes fill their range everywhere."""
    return layer.scales.float().square().mean(1).clamp(min=1e-20).log() / 2


def reorder(values: torch.Tensor, name: str) -> torch.Tensor:
    """The last dimension with each of its blocks in the order of that name; as it is where blocks
    do not fill it.
    """
    block = torch.tensor(_BLOCKS[name])
    if values.shape[-1] % len(block):
        return values
    order = torch.arange(values.shape[-1]).view(-1, len(block))[:, block].reshape(-1)
    return values[..., order]


def alike(a: torch.Tensor, b: torch.Tensor) -> float:
    """Square of the correlation. Its sign differs from layer to layer even in healthy models."""
    return correlation(a, b) ** 2


def halves_apart(heads: torch.Tensor) -> float:
    """[heads, D], log sizes: which share of the variance within a mean head is the difference
    between its halves, 0..1.
    """
    mean = (heads - heads.mean(1, keepdim=True)).mean(0)
    first, second = mean.chunk(2)
    variance = float(mean.var(unbiased=False))
    return float((first.mean() - second.mean()) ** 2) / 4 / variance if variance > 1e-9 else 0.0


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of all values; 0 where either does not vary."""
    a, b = a - a.mean(), b - b.mean()
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size > 1e-9 else 0.0
