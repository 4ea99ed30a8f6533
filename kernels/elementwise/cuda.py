"""Row ops on CUDA in half precision: rows.cu, and what a tensor must be for it.

A tensor that is not (fp32, an odd width, a slice with gaps) takes the torch way of fast.py.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.elementwise.fast import FastRows
from kernels.elementwise.op import AddNormFn, HeadLayout, RowFn
from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.spec.op import OpKey
from kernels.spec.registry import refuse_all_but_half

SOURCE = CudaSource("elementwise/rows.cu")
VECTOR = 8
"""Values of one 16-byte access; a row is whole accesses."""
MOST_THREADS = 512
SILU_THREADS = 128
DTYPES = {torch.float16: 0, torch.bfloat16: 1}


def norm_threads(width: int) -> int:
    """Of a block, which takes one row: one access each where it can."""
    return min(MOST_THREADS, -(-width // (32 * VECTOR)) * 32)


def norm_variant(entry: str, width: int, bf16: int, wide: int = 0) -> Variant:
    """rms_norm or add_rms_norm for rows of `width` values. wide: 1 for an fp32 residual stream."""
    threads = norm_threads(width)
    defines = {"WIDTH": width, "THREADS": threads, "BF16": bf16, "WIDE": wide}
    return Variant(SOURCE, entry, defines, max_registers=64, threads=threads)


def silu_variant(bf16: int) -> Variant:
    """The gated SiLU; its width is an argument."""
    return Variant(SOURCE, "silu_mul", {"BF16": bf16}, max_registers=48, threads=SILU_THREADS)


SHIPPED = tuple(
    norm_variant(entry, width, bf16, wide)
    for entry in ("rms_norm", "add_rms_norm", "leave_norm")
    for width in (576, 2048, 3584, 8192)
    for bf16, wide in ((0, 0), (1, 0), (0, 1))
    if entry != "leave_norm" or not bf16
) + tuple(silu_variant(bf16) for bf16 in (0, 1))


def leave_norm(
    stream: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    squares: torch.Tensor,
    lift: torch.Tensor,
) -> None:
    """The stream [M, H], fp16 or fp32, as products that carry it on want it: see
    kernels.linear.carry. weight f32[H]; out f16[M, H], squares f32[M, H / 16] and lift f32[M].
    """
    rows, width = stream.shape
    kernel = _norm_kernel("leave_norm", width, 0, int(stream.dtype == torch.float32))
    block = (norm_threads(width), 1, 1)
    kernel.launch(
        (rows, 1, 1), block, stream, weight, out, squares, lift, eps, launch_dependents=True
    )


@cache
def _norm_kernel(entry: str, width: int, bf16: int, wide: int) -> Kernel:
    return norm_variant(entry, width, bf16, wide).kernel()


@cache
def _silu_kernel(bf16: int) -> Kernel:
    return silu_variant(bf16).kernel()


def _fits(x: torch.Tensor, width: int) -> bool:
    return x.dtype in DTYPES and _lies(x, width)


def _lies(x: torch.Tensor, width: int) -> bool:
    return width % VECTOR == 0 and x.is_contiguous() and x.is_cuda


class CudaRows:
    """The RowOps of half-precision activations on a GPU. narrow: what norms of an fp32 residual
    stream give; None where activations and residual have one dtype.
    """

    name = "cuda.rows"

    def __init__(self, narrow: torch.dtype | None = None) -> None:
        self._torch = FastRows()
        self._narrow = narrow

    def refuse(self, key: OpKey) -> str | None:
        """None where the kernels can serve a model's activations; else why not."""
        return refuse_all_but_half(key, "rounds to half precision", "holds")

    def norm(self, weight: torch.Tensor, eps: float) -> RowFn:
        """See RowOps. weight f32 on the device."""
        width, weight = weight.shape[0], weight.float().contiguous()
        other = self._torch.norm(weight, eps)

        def run(x: torch.Tensor) -> torch.Tensor:
            given = self._given(x)
            if not (given in DTYPES and _lies(x, width)):
                return other(x).to(given)
            out = torch.empty_like(x, dtype=given)
            kernel = _norm_kernel("rms_norm", width, DTYPES[given], int(x.dtype != given))
            block = (norm_threads(width), 1, 1)
            grid = (x.numel() // width, 1, 1)
            kernel.launch(grid, block, x, weight, out, eps, launch_dependents=True)
            return out

        return run

    def add_norm(self, weight: torch.Tensor, eps: float) -> AddNormFn:
        """See RowOps: the sum is rounded to the residual's dtype before the norm sees it."""
        width, weight = weight.shape[0], weight.float().contiguous()
        other = self._torch.add_norm(weight, eps)

        def run(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
            given = self._given(x)
            if not (_lies(x, width) and _fits(delta, width) and delta.dtype == given):
                return other(x, delta).to(given)
            out = torch.empty_like(delta)
            kernel = _norm_kernel("add_rms_norm", width, DTYPES[given], int(x.dtype != given))
            block = (norm_threads(width), 1, 1)
            grid = (x.numel() // width, 1, 1)
            kernel.launch(grid, block, x, delta, weight, out, eps, launch_dependents=True)
            return out

        return run

    def _given(self, x: torch.Tensor) -> torch.dtype:
        """The dtype of x's norm."""
        is_wide = self._narrow is not None and x.dtype == torch.float32
        return self._narrow if is_wide and self._narrow is not None else x.dtype

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor, heads: HeadLayout) -> RowFn:
        """See RowOps. The fused kernel of kernels.kv does this in the engine's own path."""
        return self._torch.rotation(cos, sin, heads)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See RowOps."""
        width = gate_up.shape[-1] // 2
        if not _fits(gate_up, width):
            return self._torch.silu_mul(gate_up)
        rows = gate_up.shape[0]
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
        grid = (-(-width // (VECTOR * SILU_THREADS)), rows, 1)
        kernel = _silu_kernel(DTYPES[gate_up.dtype])
        kernel.launch(grid, (SILU_THREADS, 1, 1), gate_up, out, width, launch_dependents=True)
        return out
