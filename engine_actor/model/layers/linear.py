"""A linear of the model: one prepared layer, or several whose outputs stand side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine_actor import ops

Projection = Callable[[torch.Tensor], torch.Tensor]


def side_by_side(parts: list[ops.Linear]) -> Projection:
    """q, k and v (or gate and up) as one: fused rows in one layer need no joining."""
    if len(parts) == 1:
        return parts[0]

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in parts], dim=-1)

    return run
