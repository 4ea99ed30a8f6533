"""Very many rows: a bounded slice of the strips made dense by one kernel, then cuBLAS.

The slice is small enough to stay in L2 between its write and its read. No second copy of the
packed weights is kept: it reads what the other strip backends read.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.linear.many_rows import refuse_many_rows, rows_for
from kernels.linear.strip import STRIP_ROWS, StripWeights, to_strips
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.op import OpKey

SOURCE = CudaSource("linear/strip_dense.cu")
ENTRY = "strip_dense"
WARPS = 8
SLICE_BYTES = 64 * 1024 * 1024
"""Of the dense slice at most; a slice is never less than LEAST_ROWS out-features."""
LEAST_ROWS = 1024


class StripCublas:
    """y in fp16, whatever the dtype of x."""

    name = "cuda.strip_cublas"

    def refuse(self, key: OpKey) -> str | None:
        return refuse_many_rows(key)

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        assert not isinstance(weights, DenseLinear)
        return self.prepare_strips(to_strips(weights), dtype)

    def prepare_strips(
        self,
        strips: StripWeights,
        dtype: torch.dtype,
        *,
        gated: bool = False,
        slice_bytes: int = SLICE_BYTES,
    ) -> LinearFn:
        """As prepare(), of weights that other backends read too."""
        n, k = strips.out_features, -(-strips.in_features // 8) * 8
        at_once = rows_at_once(n, k, slice_bytes)

        def run(x: torch.Tensor) -> torch.Tensor:
            x = rows_for(x, strips)
            y = torch.empty(x.shape[0], n, dtype=torch.float16, device=x.device)
            scratch = torch.empty(at_once, k, dtype=torch.float16, device=x.device)
            for first in range(0, n, at_once):
                last = min(first + at_once, n)
                dense = scratch[: last - first]
                make_dense(strips, first // STRIP_ROWS, dense)
                torch.mm(x, dense.T, out=y[:, first:last])
            y = y if strips.bias is None else y.add_(strips.bias)
            return gated_product(y) if gated else y

        return run


def gated_product(y: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows [M, N] of interleaved strips (strip.interleave_halves)."""
    gate, up = y.view(y.shape[0], -1, 2, STRIP_ROWS // 2).unbind(2)
    return (torch.nn.functional.silu(gate) * up).flatten(1)


def rows_at_once(n: int, k: int, slice_bytes: int) -> int:
    """Out-features of a slice, whole strips: as many as the scratch holds, in even slices."""
    most = max(LEAST_ROWS, slice_bytes // (2 * k))
    slices = -(-n // most)
    return -(-n // (slices * STRIP_ROWS)) * STRIP_ROWS


def make_dense(strips: StripWeights, first_strip: int, dense: torch.Tensor) -> None:
    """Fill dense fp16 [rows, K rounded up to 8] with the rows of strip first_strip and the next."""
    rows, k = dense.shape
    group = 0 if strips.scales.shape[1] == 1 else strips.group
    kernel_of(strips.bits, group, strips.offsets is not None).launch(
        (-(-k // (64 * WARPS)), -(-rows // STRIP_ROWS), 1),
        (32 * WARPS, 1, 1),
        strips.words,
        strips.scales,
        strips.offsets,
        dense,
        first_strip,
        rows,
        k,
        strips.padded_columns // 64,
        strips.scales.shape[1],
    )


@cache
def kernel_of(bits: int, group: int, offsets: bool) -> Kernel:
    """One Kernel object for each variant: it holds what was loaded."""
    return _variant(bits, group, offsets).kernel()


def _variant(bits: int, group: int, offsets: bool) -> Variant:
    defines = {"BITS": bits, "GROUP": group, "OFFSETS": int(offsets)}
    return Variant(SOURCE, ENTRY, defines, 48, 0, threads=32 * WARPS)


SHIPPED = tuple(
    _variant(bits, group, offsets)
    for bits in (4, 3)
    for group, offsets in ((128, False), (32, True))
)
