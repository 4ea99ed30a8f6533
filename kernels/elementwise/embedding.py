"""Rows of a quantised embedding table on CUDA: embedding.cu beside dequantise.gather_rows."""

from __future__ import annotations

from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.pack.dequantise import gather_rows
from kernels.pack.packed_linear import PackedLinear

SOURCE = CudaSource("elementwise/embedding.cu")
BITS = (4, 8)
VECTOR = 8
THREADS = 64
DTYPES = {torch.float16: 0, torch.bfloat16: 1}


def variant(bits: int, bf16: int) -> Variant:
    """The compiled kernel for one width of codes."""
    defines = {"BITS": bits, "BF16": bf16}
    return Variant(SOURCE, "gather_rows", defines, max_registers=48, threads=THREADS)


SHIPPED = tuple(variant(bits, bf16) for bits in BITS for bf16 in (0, 1))


@cache
def _kernel(bits: int, bf16: int) -> Kernel:
    return variant(bits, bf16).kernel()


def refuse_gather(table: PackedLinear, dtype: torch.dtype) -> str | None:
    """None where the kernel can look rows of `table` up into `dtype`; else why not."""
    if not table.qweight.is_cuda:
        return "runs on a GPU only"
    if dtype not in DTYPES:
        return f"gives half precision, not {dtype}"
    if table.bits not in BITS:
        return f"reads {BITS} bits, not {table.bits}"
    if table.perm is not None:
        return "columns are permuted"
    if table.offsets is not None and table.offsets.dtype != torch.float16:
        return "offsets are not fp16"
    return None


def gather_rows_cuda(table: PackedLinear, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows ids i64[T] of the table, [T, K] in `dtype`: the bits of gather_rows(...).to(dtype)."""
    if refuse_gather(table, dtype) is not None:
        return gather_rows(table, ids).to(dtype)
    columns = table.in_features
    out = torch.empty(ids.shape[0], columns, dtype=dtype, device=ids.device)
    _kernel(table.bits, DTYPES[dtype]).launch(
        (-(-columns // (VECTOR * THREADS)), ids.shape[0], 1),
        (THREADS, 1, 1),
        table.qweight,
        table.scales,
        table.offsets,
        table.zeros,
        ids,
        out,
        columns,
        table.qweight.shape[1],
        table.group_size,
        table.scales.shape[1],
        # The first kernel of a step, launched behind all that is before it: later ones may read a
        # step's inputs and older cache early because of that (attention/decode_heads.cu).
        launch_dependents=False,
    )
    return out
