"""DenseLinear: an unquantised linear layer, the other thing a checkpoint reader delivers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class DenseLinear:
    """y = x @ weight.T + bias with weight [N, K] of any float dtype and bias [N] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2:
            raise ValueError(f"weight must be [N, K], got shape {tuple(self.weight.shape)}")
        if self.bias is not None and tuple(self.bias.shape) != (self.out_features,):
            raise ValueError(
                f"bias must have shape ({self.out_features},), got {tuple(self.bias.shape)}"
            )

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.weight.shape[0])

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.weight.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.weight, self.bias)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)
