"""17 to 32 rows of x through W3 and W4 strips on sm_90: x laid out in the strips' order for wgmma.

`cuda.strip_order` owns the shapes of a block, the grid and the launch of strip_order.cu. Sums of 64
out-features are computed whole, so a layer must have many of those. Knows no model.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.linear.many_rows import refuse_many_rows
from kernels.linear.strip import StripWeights, padded_columns, to_strips
from kernels.linear.strip_call import StripCall
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.op import OpKey

SOURCE = CudaSource("linear/strip_order.cu")
ENTRY = "strip_order"
SM = 90
GROUP = 128
STEP = 512
"""Of K: 256 columns are on their way while 256 are multiplied."""
CONSUMERS = 3
"""Warpgroups that multiply; one more lays x out."""
STRIPS = 4
"""That a warpgroup multiplies at a time."""
ROWS = 32
"""Of x there is room for in a block."""
DEPTH = 10
"""256 columns of x, so many times, lie in shared memory together."""
THREADS = 128 * (CONSUMERS + 1)
SHARED_BYTES = DEPTH * ROWS * (512 + 8) + 1024
"""x, two sums of it for each row and 256 columns, and what 1 KiB's alignment costs."""


def variant(bits: int, offsets: bool, gated: bool = False, watched: bool = False) -> Variant:
    """The compiled kernel for one kind of weights, with its budget. watched: for tools that watch
    every access to shared memory.
    """
    return Variant(
        SOURCE,
        ENTRY,
        {
            "BITS": bits,
            "GROUP": GROUP,
            "OFFSETS": int(offsets),
            "GATED": int(gated),
            "ROWS": ROWS,
            "CONSUMERS": CONSUMERS,
            "DEPTH": DEPTH,
            "WATCHED": int(watched),
        },
        max_registers=128,
        max_shared_bytes=SHARED_BYTES + 256,
        threads=THREADS,
        shared_bytes=SHARED_BYTES,
        first_sm=SM,
        spill_bytes=96 if offsets else 32,
    )


@cache
def _kernel(bits: int, offsets: bool, gated: bool, watched: bool) -> Kernel:
    """One Kernel object a variant: it holds what was loaded."""
    return variant(bits, offsets, gated, watched).kernel()


class Ordered(StripCall):
    """watched: see variant()."""

    def __init__(self, weights: StripWeights, gated: bool = False, watched: bool = False) -> None:
        super().__init__(weights, gated)
        self.watched = watched

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        y: torch.Tensor,
        launch_dependents: bool,
    ) -> None:
        weights = self.weights
        tiles = -(-weights.strips // STRIPS)
        offsets = weights.offsets is not None
        _kernel(weights.bits, offsets, self.gated, self.watched).launch(
            (min(tiles, self.multiprocessors), -(-x.shape[0] // ROWS), 1),
            (THREADS, 1, 1),
            x,
            weights.words,
            weights.scales,
            weights.offsets,
            weights.bias,
            residual,
            y,
            x.shape[0],
            weights.out_features,
            x.shape[1],
            weights.strips,
            weights.padded_columns // 256,
            launch_dependents=launch_dependents,
        )


class OrderedRows:
    """y in fp16, whatever the dtype of x."""

    name = "cuda.strip_order"

    def refuse(self, key: OpKey) -> str | None:
        if key.device == "cuda" and key.sm != SM:
            return f"made of sm_{SM}a's own instructions, this is sm_{key.sm}"
        if key.m > ROWS:
            return f"{key.m} rows of x, at most {ROWS} are worth it"
        refused = refuse_many_rows(key)
        if refused is not None:
            return refused
        columns = padded_columns(key.bits, key.k)
        if key.group != GROUP:
            return f"group {key.group} is not {GROUP}"
        return f"{columns} columns are no multiple of {STEP}" if columns % STEP else None

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        """Raises ValueError where an offset does not fit fp16 (strip.to_strips)."""
        assert not isinstance(weights, DenseLinear)
        return Ordered(to_strips(weights))

    def prepare_strips(
        self, strips: StripWeights, dtype: torch.dtype, *, gated: bool = False
    ) -> LinearFn:
        """The same for weights that others read as well."""
        return Ordered(strips, gated)


SHIPPED = tuple(
    variant(bits, offsets, gated)
    for bits, offsets, gated in (
        (4, False, False),
        (4, False, True),
        (3, False, False),
        (3, False, True),
        (4, True, False),
        (3, True, True),
    )
)
