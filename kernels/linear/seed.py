"""The seed's kernels on the bytes on disk: single-row GEMV, batch tiles, tiled GEMM.

They are the historical baseline that every faster kernel is measured against, and run on any card
from sm_80 on. fp16 in and out, fp32 sums. Which of them the seed uses for how many rows is in
kernels/linear/row_policy.py.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.linear.packed_bytes import PackedBytes, packed_bytes, refuse_bytes
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.op import OpKey

GEMV = CudaSource("linear/seed_gemv.cu")
GEMM = CudaSource("linear/seed_gemm.cu")
DP_BATCH_TILE = 8
"""Rows of x that share one read of the weights in the batch tile; the seed's name."""
BM, BN, BK, THREADS = 32, 64, 32, 256
"""The seed's tile of rows, out-features and columns, and its block."""
ROWS_OF_BLOCK = 8
"""Out-features of a GEMV block, one a warp."""


class SeedGemv:
    """One row, or each row of x for itself (grid.y = batch), which reads the weights M times."""

    name = "cuda.seed_gemv"

    def refuse(self, key: OpKey) -> str | None:
        return refuse_bytes(key)

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        return _prepare_gemv(weights, batch=1)


class SeedBatchTile:
    """Up to 8 rows of x share each weight. For W4 the seed's way for 2 to 8 rows; for W3 its
    experiment, which read less and was slower, so that no policy names it.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"cuda.seed_w{bits}_batch_tile"

    def refuse(self, key: OpKey) -> str | None:
        if key.bits in (3, 4) and key.bits != self.bits:
            return f"holds {self.bits} bits, not {key.bits}"
        return refuse_bytes(key)

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        return _prepare_gemv(weights, batch=DP_BATCH_TILE)


class SeedTiled:
    """Tiles of 32 x 64 x 32 on CUDA cores. stages: 0 as in the seed; 1 to 3 fetch the tiles by
    cp.async, the seed's own next step, and want K in whole tiles.
    """

    def __init__(self, stages: int = 0) -> None:
        self.stages = stages
        self.name = "cuda.seed_tiled" + (f"_async{stages}" if stages else "")

    def refuse(self, key: OpKey) -> str | None:
        if self.stages and key.k % BK:
            return f"K = {key.k} is not a multiple of {BK}"
        return refuse_bytes(key)

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        assert not isinstance(weights, DenseLinear)
        layer = packed_bytes(weights)
        kernel = gemm_kernel(layer.bits, self.stages, layer.affine)

        def run(x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0]
            y = torch.empty(rows, layer.n, dtype=torch.float16, device=x.device)
            if rows:
                grid = (-(-layer.n // BN), -(-rows // BM), 1)
                kernel.launch(grid, (THREADS, 1, 1), *_arguments(layer, x, y))
            return y

        return run


def _prepare_gemv(weights: Weights, batch: int) -> LinearFn:
    assert not isinstance(weights, DenseLinear)
    layer = packed_bytes(weights)
    kernel = gemv_kernel(layer.bits, batch, layer.is_whole, layer.affine)
    block = (32 * ROWS_OF_BLOCK, 1, 1)
    blocks = -(-layer.n // ROWS_OF_BLOCK)

    def run(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        y = torch.empty(rows, layer.n, dtype=torch.float16, device=x.device)
        if rows:
            grid = (blocks, -(-rows // batch), 1)
            kernel.launch(grid, block, *_arguments(layer, x, y))
        return y

    return run


def _arguments(layer: PackedBytes, x: torch.Tensor, y: torch.Tensor) -> tuple[object, ...]:
    x = layer.rows_of(x)
    tensors = (x, layer.codes, layer.scales, layer.shifts, layer.bias, y)
    return (*tensors, x.shape[0], layer.n, layer.k, layer.group)


@cache
def gemv_kernel(bits: int, batch: int, whole: bool, affine: int) -> Kernel:
    """One Kernel object a variant: it holds what was loaded."""
    return _gemv(bits, batch, whole, affine).kernel()


@cache
def gemm_kernel(bits: int, stages: int, affine: int) -> Kernel:
    """As gemv_kernel."""
    return _gemm(bits, stages, affine).kernel()


def _gemv(bits: int, batch: int, whole: bool, affine: int) -> Variant:
    defines = {"BITS": bits, "BATCH": batch, "WHOLE": int(whole), "AFFINE": affine}
    # The seed's finding on W3: eight sums cost occupancy. 64 registers are 4 blocks on sm_86.
    most = 40 if batch == 1 else 64
    return Variant(GEMV, "seed_gemv", defines, most, 0, threads=32 * ROWS_OF_BLOCK)


def _gemm(bits: int, stages: int, affine: int) -> Variant:
    defines = {"BITS": bits, "STAGES": stages, "AFFINE": affine}
    shared = (7 + 3 * max(1, stages)) * 1024
    return Variant(GEMM, "seed_gemm", defines, 80, shared, threads=THREADS)


SHIPPED = (
    *(
        _gemv(bits, batch, whole, affine)
        for bits in (4, 3)
        for batch in (1, DP_BATCH_TILE)
        for whole in (True, False)
        for affine in (0, 1, 2)
    ),
    *(
        _gemm(bits, stages, affine)
        for bits in (4, 3)
        for stages, affine in ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (3, 0))
    ),
)
