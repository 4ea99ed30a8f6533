"""A layer of strips called in one launch: what is done around it, whichever kernel it is.

For kernels that write y whole. Those that need scratch and a plan are many_rows.py's, those that
choose a block's shape for each number of rows strip_few.py's. Knows no shape of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kernels.linear.many_rows import rows_for
from kernels.linear.strip import StripWeights
from kernels.spec.device import device_info


class StripCall(ABC):
    """Call it with x [M, K]; y is fp16 [M, N]. More rows than a block has room for take turns.

    gated: W is a fused gate and up, re-laid by strip.interleave_halves(); y is silu(gate) * up,
    [M, N / 2].
    """

    def __init__(self, weights: StripWeights, gated: bool = False) -> None:
        self.weights = weights
        self.gated = gated
        self.width = weights.out_features // (2 if gated else 1)
        self.multiprocessors = device_info(weights.words.device).multiprocessors
        # The kernel ahead of the first call may be the one that wrote the weights.
        self._is_first = True

    def __call__(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """residual: fp16, shaped like y and added last. out: where y goes, contiguous fp16; may be
        the residual itself.
        """
        y = out
        if y is None:
            y = torch.empty(x.shape[0], self.width, dtype=torch.float16, device=x.device)
        if x.shape[0]:
            self._launch(rows_for(x, self.weights), residual, y, not self._is_first)
            self._is_first = False
        return y

    @abstractmethod
    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        y: torch.Tensor,
        launch_dependents: bool,
    ) -> None:
        """Queue the kernel for at least one row, as rows_for() made them."""
