"""17 to 32 rows of x through many W3 and W4 strips on sm_90: a layer prepared.

`cuda.strip_stream` is a backend of its own because it takes no norms in: a decode step must not
take it for one that does (StripFew.normed). Knows no model.
"""

from __future__ import annotations

import torch

from kernels.linear.many_rows import refuse_many_rows
from kernels.linear.strip import StripWeights, padded_columns, to_strips
from kernels.linear.strip_call import StripCall
from kernels.linear.strip_stream import SM, launch_stream, refuse_stream, stream_tile
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.op import OpKey

LEAST_ROWS, MOST_ROWS = 17, 32


class Stream(StripCall):
    """Of as many eights of rows as x has, 32 at most in a block."""

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        y: torch.Tensor,
        launch_dependents: bool,
    ) -> None:
        launch_stream(
            stream_tile(self.weights.padded_columns, room_for(x.shape[0])),
            self.weights,
            x,
            residual,
            y,
            multiprocessors=self.multiprocessors,
            gated=self.gated,
            launch_dependents=launch_dependents,
        )


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
