"""17 to 32 rows of x through many W3 and W4 strips on sm_90: a layer prepared.

`cuda.strip_stream` is a backend of its own because a decode step must not take it for one whose
norms can move into it (StripFew.normed): there short blocks are faster. Knows no model.
"""

from __future__ import annotations

import torch

from kernels.linear.many_rows import refuse_many_rows, rows_for
from kernels.linear.strip import StripWeights, padded_columns, to_strips
from kernels.linear.strip_stream import SM, launch_stream, refuse_stream, stream_tile
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.device import device_info
from kernels.spec.op import OpKey

LEAST_ROWS, MOST_ROWS = 17, 32


class Stream:
    """Call it with x [M, K]; y is fp16 [M, N]. More than 32 rows take turns.

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
        if x.shape[0] == 0:
            return y
        launch_stream(
            stream_tile(self.weights.padded_columns, room_for(x.shape[0])),
            self.weights,
            rows_for(x, self.weights),
            residual,
            y,
            multiprocessors=self.multiprocessors,
            gated=self.gated,
            launch_dependents=not self._is_first,
        )
        self._is_first = False
        return y


def room_for(rows: int) -> int:
    """Of x in a block, for so many rows."""
    return min(-(-rows // 8) * 8, MOST_ROWS)


class StreamRows:
    """y in fp16, whatever the dtype of x."""

    name = "cuda.strip_stream"

    def refuse(self, key: OpKey) -> str | None:
        if key.device == "cuda" and key.sm != SM:
            return f"made of sm_{SM}'s own instructions, this is sm_{key.sm}"
        if key.m and not LEAST_ROWS <= key.m <= MOST_ROWS:
            return f"{key.m} rows of x, {LEAST_ROWS} to {MOST_ROWS} are worth it"
        if key.bits not in (3, 4):
            return refuse_many_rows(key)
        columns = padded_columns(key.bits, key.k)
        return refuse_many_rows(key) or refuse_stream(key.group, columns, room_for(key.m or 1))

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        """Raises ValueError where an offset does not fit fp16 (strip.to_strips)."""
        assert not isinstance(weights, DenseLinear)
        return Stream(to_strips(weights))

    def prepare_strips(
        self, strips: StripWeights, dtype: torch.dtype, *, gated: bool = False
    ) -> LinearFn:
        """The same for weights that others read as well."""
        return Stream(strips, gated)
