"""Draw an index from probabilities by inverting their cumulative distribution.

Knows no sampling parameters. Probabilities become integer weights first: sums of integers are the
same in any order, so one row gives the same index alone, in a batch, on any device and by either of
the two ways below.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

WEIGHT_ONE = 2.0**40
"""Probability 1 as a weight. Tokens less probable than 1e-12 are lost, at most 2e-7 of the whole;
sums stay far below 2^53, so they are exact in fp64 too."""


def weights(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities as int64 weights; the scale is a power of two, so only the tail is cut."""
    return (probabilities * WEIGHT_ONE).to(torch.int64)


def invert(
    probabilities: torch.Tensor, cutoff: torch.Tensor | None, points: Sequence[float]
) -> list[int]:
    """For each row of fp32 probabilities [R, V] the index at which the cumulative weight of those
    at or above cutoff [R, 1] passes points[r] (in [0, 1)) of the row's total.
    """
    if cutoff is not None and probabilities.device.type == "cpu":
        pairs = zip(cutoff[:, 0].tolist(), points, strict=True)
        return [
            _invert_few(row, least, point)
            for row, (least, point) in zip(probabilities.numpy(), pairs, strict=True)
        ]
    if cutoff is not None:
        probabilities = probabilities * (probabilities >= cutoff)
    return _invert_all(weights(probabilities).cumsum(dim=-1), points)


def _invert_all(cumulative: torch.Tensor, points: Sequence[float]) -> list[int]:
    vocab = cumulative.shape[1]
    shares = torch.tensor(points, dtype=torch.float64, device=cumulative.device).unsqueeze(-1)
    # Both factors are exact in fp64, and the one rounding of their product is the same everywhere.
    targets = (cumulative[:, -1:].double() * shares).to(torch.int64)
    found = torch.searchsorted(cumulative, targets, right=True).clamp_(max=vocab - 1)
    indices: list[int] = found[:, 0].tolist()
    return indices


def _invert_few(probabilities: np.ndarray, least: float, point: float) -> int:
    """The same on one CPU row, over the few that are left only."""
    kept = np.flatnonzero(probabilities >= np.float32(least))
    cumulative = (probabilities[kept] * np.float32(WEIGHT_ONE)).astype(np.int64).cumsum()
    target = int(float(cumulative[-1]) * point)
    found = int(cumulative.searchsorted(target, side="right"))
    return int(kept[min(found, len(kept) - 1)])
