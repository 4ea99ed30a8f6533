"""Up to 64 rows of x through W3 and W4 strips: a layer prepared.

`cuda.strip_few` runs on sm_80 and newer. The shape of a block (strip_choice.py) is a function of
layer, rows and card only, so equal calls give equal bits. Knows no model.
"""

from __future__ import annotations

import torch

from kernels.linear.many_rows import refuse_many_rows, rows_for
from kernels.linear.strip import StripWeights, to_strips
from kernels.linear.strip_choice import (
    ALONE,
    ALONG_K,
    ALONG_K_16,
    ALONG_K_32,
    ALONG_K_PAIRS_16,
    ALONG_K_PAIRS_32,
    EARLY_PAIRS_32,
    HALF_K,
    HALF_K_16,
    HALF_K_PAIRS_32,
    WIDE,
    WIDE_32,
    WIDE_FOURS,
    WIDE_PAIRS,
    WIDE_PAIRS_16,
    WIDE_THREES_16,
    choose_tile,
)
from kernels.linear.strip_gemv import GemvTile, launch_gemv
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.device import device_info
from kernels.spec.op import OpKey

MOST_ROWS = 64


class StripFew:
    """A layer prepared for few rows. Call it with x [M, K]; y is fp16 [M, N]. More than 64 rows
    are right too, and slow.

    gated: W is a fused gate and up, re-laid by strip.interleave_halves(); y is silu(gate) * up,
    [M, N / 2]. launch_dependents: on sm_90 and newer a call may begin to load weights before the
    kernel ahead of it in the stream has ended.
    """

    def __init__(
        self, weights: StripWeights, gated: bool = False, launch_dependents: bool = True
    ) -> None:
        self.weights = weights
        self.gated = gated
        self.width = weights.out_features // (2 if gated else 1)
        self.multiprocessors = device_info(weights.words.device).multiprocessors
        self._launch_dependents = launch_dependents
        # The kernel ahead of the first call may be the one that wrote the weights.
        self._is_first = True

    def __call__(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        tile: GemvTile | None = None,
    ) -> torch.Tensor:
        """residual: fp16, shaped like y and added last. out: where y goes, contiguous fp16; may be
        the residual itself. tile: forced.
        """
        m = x.shape[0]
        x = rows_for(x, self.weights)
        y = out
        if y is None:
            y = torch.empty(m, self.width, dtype=torch.float16, device=x.device)
        if m == 0:
            return y
        weights = self.weights
        if tile is None:
            columns = weights.padded_columns
            tile = choose_tile(m, weights.strips, columns, weights.bits, self.multiprocessors)
        overlap = self._launch_dependents and not self._is_first
        self._is_first = False
        launch_gemv(tile, weights, x, residual, y, gated=self.gated, launch_dependents=overlap)
        return y


class FewRows:
    """y in fp16, whatever the dtype of x."""

    name = "cuda.strip_few"

    def refuse(self, key: OpKey) -> str | None:
        if key.m > MOST_ROWS:
            return f"{key.m} rows of x, at most {MOST_ROWS} are worth it"
        return refuse_many_rows(key)

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        """Raises ValueError where an offset does not fit fp16 (strip.to_strips)."""
        assert not isinstance(weights, DenseLinear)
        return StripFew(to_strips(weights))

    def prepare_strips(
        self, strips: StripWeights, dtype: torch.dtype, *, gated: bool = False
    ) -> LinearFn:
        """The same for weights that others read as well."""
        return StripFew(strips, gated)


SHIPPED = (
    *(
        tile.variant(4, 128, offsets=False)
        for tile in (
            ALONE[4],
            ALONG_K,
            HALF_K[4],
            WIDE,
            WIDE_PAIRS[4],
            ALONG_K_16,
            ALONG_K_PAIRS_16,
            HALF_K_16,
            WIDE_PAIRS_16[4],
            WIDE_THREES_16,
            ALONG_K_32,
            ALONG_K_PAIRS_32,
            HALF_K_PAIRS_32,
            EARLY_PAIRS_32,
            WIDE_32[4],
        )
    ),
    *(
        tile.variant(3, 128, offsets=False)
        for tile in (
            ALONE[3],
            HALF_K[3],
            WIDE_PAIRS[3],
            WIDE_FOURS,
            WIDE_PAIRS_16[3],
            WIDE_32[3],
        )
    ),
    *(tile.variant(4, 32, offsets=True) for tile in (WIDE, WIDE_PAIRS_16[4])),
    *(
        tile.variant(4, 128, offsets=False, gated=True)
        for tile in (WIDE, WIDE_PAIRS[4], WIDE_THREES_16, WIDE_32[4])
    ),
)
"""Every shape for W4 in symmetric groups of 128, the largest ones for W3 and for groups of 32 with
offsets, gate and up on wide shapes; other kinds of weights compile on first use.
"""
