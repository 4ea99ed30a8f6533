"""Up to 64 rows of x through W3 and W4 strips: a layer prepared, and which kernel a call takes.

`cuda.strip_few` runs on sm_80 and newer. The choice (strip_choice.py) is a function of shape and
card, so a row of x gives the same bits whenever the number of rows is the same. Knows no model.
"""

from __future__ import annotations

import torch

from kernels.linear.many_rows import refuse_many_rows, rows_for
from kernels.linear.strip import StripWeights, to_strips
from kernels.linear.strip_batch import MOST_ROWS, launch_batch
from kernels.linear.strip_choice import (
    ALONG_K,
    WIDE,
    WIDE_PAIRS_16,
    Batch,
    Choice,
    choose_kernel,
    shipped_tiles,
)
from kernels.linear.strip_gemv import launch_gemv
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.device import device_info
from kernels.spec.op import OpKey


class StripFew:
    """A layer prepared for few rows. Call it with x [M, K], M <= 64; y is fp16 [M, N].

    gated: W is a fused gate and up, re-laid by strip.interleave_halves(); y is silu(gate) * up,
    [M, N / 2]. launch_dependents: on sm_90 and newer each call may begin to load weights before the
    kernel ahead of it in the stream has ended. One layer must not run on two streams at a time: its
    counters are its own.
    """

    def __init__(
        self, weights: StripWeights, gated: bool = False, launch_dependents: bool = False
    ) -> None:
        self.weights = weights
        self.gated = gated
        self.launch_dependents = launch_dependents
        self.width = weights.out_features // (2 if gated else 1)
        device = weights.words.device
        self.multiprocessors = device_info(device).multiprocessors
        self.arrivals = torch.zeros(weights.strips, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        choice: Choice | None = None,
    ) -> torch.Tensor:
        """residual: fp16, shaped like y and added last. out: where y goes, contiguous fp16; may be
        the residual itself. choice: forced. Raises ValueError for more than 64 rows.
        """
        m = x.shape[0]
        if m > MOST_ROWS:
            raise ValueError(f"{m} rows of x, at most {MOST_ROWS} fit")
        x = rows_for(x, self.weights)
        y = out
        if y is None:
            y = torch.empty(m, self.width, dtype=torch.float16, device=x.device)
        if m == 0:
            return y
        if choice is None:
            weights = self.weights
            choice = choose_kernel(
                m, weights.strips, weights.steps, weights.bits, self.multiprocessors
            )
        if isinstance(choice, Batch):
            launch_batch(
                choice.tile,
                choice.splits,
                self.weights,
                x,
                residual,
                y,
                self.arrivals,
                gated=self.gated,
                launch_dependents=self.launch_dependents,
            )
        else:
            launch_gemv(
                choice,
                self.weights,
                x,
                residual,
                y,
                gated=self.gated,
                launch_dependents=self.launch_dependents,
            )
        return y


class FewRows:
    """y in fp16, whatever the dtype of x."""

    name = "cuda.strip_few"

    def refuse(self, key: OpKey) -> str | None:
        if key.m > MOST_ROWS:
            return f"{key.m} rows of x, at most {MOST_ROWS} fit"
        return refuse_many_rows(key)

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        """Raises ValueError where an offset does not fit fp16 (strip.to_strips)."""
        assert not isinstance(weights, DenseLinear)
        return StripFew(to_strips(weights))

    def prepare_strips(self, strips: StripWeights, dtype: torch.dtype) -> LinearFn:
        """The same for weights that others read as well."""
        return StripFew(strips)


SHIPPED = (
    *(tile.variant(bits, 128, offsets=False) for bits in (4, 3) for tile in shipped_tiles(bits)),
    *(tile.variant(4, 32, offsets=True) for tile in (ALONG_K, WIDE, WIDE_PAIRS_16)),
    *(tile.variant(4, 32, offsets=True) for tile in shipped_tiles(4) if tile.rows == 64),
)
"""Every shape for symmetric groups of 128, and some for groups of 32 with offsets; other kinds of
weights compile on first use.
"""
