"""Small weights and inputs that look like a model's: few strong directions, uneven columns."""

from __future__ import annotations

import torch


def weight(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gaussian with a few outliers."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=draw) * 0.05
    values[torch.rand(rows, columns, generator=draw) > 0.995] *= 6.0
    return values.to(dtype)


def hessian(
    columns: int, seed: int, tokens: int = 256, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Mean of x x.T over correlated inputs of very different sizes."""
    draw = torch.Generator().manual_seed(seed + 1000)
    mixing = torch.randn(columns, columns, generator=draw, dtype=dtype) / columns**0.5
    x = torch.randn(tokens, columns, generator=draw, dtype=dtype) @ (
        mixing + 0.5 * torch.eye(columns, dtype=dtype)
    )
    x *= torch.exp(torch.randn(columns, generator=draw, dtype=dtype))
    return x.t() @ x / tokens
