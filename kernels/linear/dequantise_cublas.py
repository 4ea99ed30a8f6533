"""Many rows: a bounded slice of W made dense by one kernel, then cuBLAS, slice after slice.

Costs the dense slice's write and read on top of the product, which is little from about a thousand
rows on. The scratch is torch's, so it is counted and captured like every other tensor.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.linear.packed_bytes import PackedBytes, packed_bytes, refuse_bytes
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.op import OpKey

SOURCE = CudaSource("linear/dequantise.cu")
SCRATCH_BYTES = 64 * 1024 * 1024
"""Of the dense slice at most; a slice is never less than LEAST_ROWS out-features."""
LEAST_ROWS = 1024
ROWS_OF_BLOCK = 8
COLUMNS_OF_BLOCK = 256
MOST_COLUMN_BLOCKS = 4
DTYPES = ("float16", "bfloat16")
WIDTHS = (3, 4, 8)


class DequantiseCublas:
    """y in the dtype of x."""

    name = "cuda.dequantise_cublas"

    def refuse(self, key: OpKey) -> str | None:
        return refuse_bytes(key, DTYPES, WIDTHS)

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        assert not isinstance(weights, DenseLinear)
        layer = packed_bytes(weights)
        at_once = rows_at_once(layer.n, layer.k)
        firsts = range(0, layer.n, at_once)

        def run(x: torch.Tensor) -> torch.Tensor:
            x = layer.rows_of(x)
            y = torch.empty(x.shape[0], layer.n, dtype=x.dtype, device=x.device)
            scratch = torch.empty(at_once, layer.k, dtype=x.dtype, device=x.device)
            for first in firsts:
                last = min(first + at_once, layer.n)
                dense = scratch[: last - first]
                dequantise_rows(layer, first, dense)
                torch.mm(x, dense.T, out=y[:, first:last])
            return y if layer.bias is None else y.add_(layer.bias)

        return run


def rows_at_once(n: int, k: int) -> int:
    """Out-features of a slice: as many as the scratch holds, in even slices."""
    most = max(LEAST_ROWS, SCRATCH_BYTES // (2 * k))
    slices = -(-n // most)
    return -(-n // slices)


def dequantise_rows(layer: PackedBytes, first: int, dense: torch.Tensor) -> None:
    """Fill dense [rows, K], fp16 or bf16 and contiguous, with out-features first, first + 1, ..."""
    rows = dense.shape[0]
    kernel = dequantise_kernel(
        layer.bits, layer.is_whole, layer.affine, dense.dtype == torch.bfloat16
    )
    across = min(MOST_COLUMN_BLOCKS, -(-layer.k // COLUMNS_OF_BLOCK))
    kernel.launch(
        (-(-rows // ROWS_OF_BLOCK), across, 1),
        (32 * ROWS_OF_BLOCK, 1, 1),
        layer.codes,
        layer.scales,
        layer.shifts,
        dense,
        first,
        rows,
        layer.k,
        layer.group,
    )


@cache
def dequantise_kernel(bits: int, whole: bool, affine: int, bf16: bool) -> Kernel:
    """One Kernel object a variant: it holds what was loaded."""
    return _variant(bits, whole, affine, bf16).kernel()


def _variant(bits: int, whole: bool, affine: int, bf16: bool) -> Variant:
    defines = {"BITS": bits, "WHOLE": int(whole), "AFFINE": affine, "BF16": int(bf16)}
    return Variant(SOURCE, "dequantise_rows", defines, 40, 0, threads=32 * ROWS_OF_BLOCK)


SHIPPED = tuple(
    _variant(bits, whole, affine, bf16)
    for bits in WIDTHS
    for whole in (True, False)
    for affine in (0, 1, 2)
    for bf16 in (False, True)
)
