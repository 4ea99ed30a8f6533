"""Draw an index from probabilities by inverting their cumulative distribution.

Knows no sampling parameters. Probabilities become integer weights first: sums of integers are the
same in any order, so one row gives the same index alone, in a batch, on any device and by either of
the two ways below (tensors for a device, NumPy for a row on the CPU, where it is twice as fast).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

WEIGHT_ONE = 2.0**30
"""Probability 1 as a weight. A row's sum fits in 31 bits, which the CPU adds fastest. Tokens less
probable than 1e-9 are never drawn; over a vocabulary of 50,000 that is at most 5e-5 of the whole,
and only where all of it is spread that thin."""

_BLOCK = 256
"""Weights summed at once on the CPU: a first search over the blocks, a second one inside one."""


def weights(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities as int64 weights; the scale is a power of two, so only the tail is cut."""
    return (probabilities * WEIGHT_ONE).to(torch.int64)


def invert(
    probabilities: torch.Tensor, cutoff: torch.Tensor | None, points: Sequence[float]
) -> list[int]:
    """For each row of fp32 probabilities [R, V] the index at which the cumulative weight of those
    at or above cutoff [R, 1] passes points[r] (in [0, 1)) of the row's total.
    """
    if probabilities.device.type != "cpu":
        return invert_tensors(probabilities, cutoff, points)
    least = [None] * len(points) if cutoff is None else cutoff[:, 0].tolist()
    triples = zip(probabilities.numpy(), least, points, strict=True)
    return [_invert_row(row, floor, point) for row, floor, point in triples]


def invert_tensors(
    probabilities: torch.Tensor, cutoff: torch.Tensor | None, points: Sequence[float]
) -> list[int]:
    """invert() in tensor operations, for all rows at once and any device."""
    if cutoff is not None:
        probabilities = probabilities * (probabilities >= cutoff)
    cumulative = weights(probabilities).cumsum(dim=-1)
    shares = torch.tensor(points, dtype=torch.float64, device=cumulative.device).unsqueeze(-1)
    # Both factors are exact in fp64, and the one rounding of their product is the same everywhere.
    targets = (cumulative[:, -1:].double() * shares).to(torch.int64)
    found = torch.searchsorted(cumulative, targets, right=True)
    indices: list[int] = found.clamp_(max=cumulative.shape[1] - 1)[:, 0].tolist()
    return indices


def _invert_row(row: np.ndarray, floor: float | None, point: float) -> int:
    """One row [V] on the CPU."""
    if floor is None:
        return _search(row, point)
    kept = np.flatnonzero(row >= np.float32(floor))
    return int(kept[_search(row[kept], point)])


def _search(probabilities: np.ndarray, point: float) -> int:
    weight = (probabilities * np.float32(WEIGHT_ONE)).astype(np.int32)
    whole = len(weight) - len(weight) % _BLOCK
    blocks = np.add.reduce(weight[:whole].reshape(-1, _BLOCK), axis=1, dtype=np.int32)
    before = np.concatenate(([0], blocks.cumsum(dtype=np.int64)))
    total = int(before[-1]) + int(weight[whole:].sum(dtype=np.int64))
    target = int(total * point)
    # The last block whose sum before it is not above the target; what is behind `whole` counts too.
    block = int(before.searchsorted(target, side="right")) - 1
    start = block * _BLOCK
    inside = weight[start : start + _BLOCK].cumsum(dtype=np.int64)
    found = int(inside.searchsorted(target - int(before[block]), side="right"))
    return min(start + found, len(weight) - 1)
