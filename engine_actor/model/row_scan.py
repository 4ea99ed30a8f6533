"""Two questions about rows of numbers: where is the largest, and which are the n largest.

The answers are exact, so they do not depend on how they are found. On the CPU NumPy finds them 5 to
15 times faster than torch does (argmax of 49,152: 9.5 us against 122; 1,024 largest: 100 us against
780; one thread, Zen 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def argmax_rows(values: torch.Tensor) -> list[int]:
    """Index of the largest of each row of [R, V]; the lowest index where several are equal."""
    if values.device.type == "cpu":
        found: list[int] = values.numpy().argmax(axis=-1).tolist()
        return found
    indices: list[int] = values.argmax(dim=-1).tolist()
    return indices


def finite_at(values: torch.Tensor, indices: Sequence[int]) -> list[bool]:
    """Whether values[r, indices[r]] is finite, for each row of [R, V]. At the index that
    argmax_rows gave this judges the whole row: a NaN counts as the largest, and a row of nothing
    but minus infinity has no other.
    """
    if values.device.type == "cpu":
        found = values.numpy()[np.arange(len(indices)), indices]
        finite: list[bool] = np.isfinite(found).tolist()
        return finite
    wanted = torch.tensor(indices, device=values.device).unsqueeze(-1)
    on_device: list[bool] = values.gather(-1, wanted)[:, 0].isfinite().tolist()
    return on_device


def largest_rows(values: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row of [R, V], descending: [R, count]."""
    if count == 1:
        return values.amax(dim=-1, keepdim=True)
    if values.device.type == "cpu":
        array = values.numpy()
        width = array.shape[-1]
        if count < width:
            array = np.partition(array, width - count, axis=-1)[..., width - count :]
        ordered = np.sort(array, axis=-1)[..., ::-1]
        return torch.from_numpy(ordered.copy())
    return values.topk(count, dim=-1).values
