"""One block of GPTQ's columns, or of the descent after it, in one launch: round_columns.cu.

Knows a block, not the order of columns nor what an error does behind the block.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.jit.availability import why_no_jit
from kernels.jit.kernel import CudaSource, Kernel, Variant

SOURCE = CudaSource("pack/round_columns.cu")
MOST_COLUMNS = 128
WARPS = 8
THREADS = 32 * WARPS


def variant(entry: str) -> Variant:
    """The compiled kernel of one loop."""
    return Variant(SOURCE, entry, {}, max_registers=64, threads=THREADS)


SHIPPED = tuple(variant(entry) for entry in ("gptq_columns", "descend_columns"))


@cache
def _kernel(entry: str) -> Kernel:
    return variant(entry).kernel()


def refuse_round_columns(weight: torch.Tensor) -> str | None:
    """None where the kernels can round columns of this weight; else why not."""
    if not weight.is_cuda:
        return "runs on a GPU only"
    if weight.dtype != torch.float32:
        return f"rounds fp32, not {weight.dtype}"
    return why_no_jit()


def gptq_columns(
    rest: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    root: torch.Tensor,
    codes: torch.Tensor,
    limits: tuple[int, int],
) -> torch.Tensor:
    """Errors fp32 [C, N] over the diagonal of `root`; writes `codes`. C at most MOST_COLUMNS.

    rest, scales, offsets, codes fp32 [C, N], contiguous; root [C, C], a block of a matrix with
    contiguous rows; limits: the smallest and the largest code.
    """
    errors = torch.empty_like(rest)
    _launch("gptq_columns", (rest, scales, offsets, root, codes, errors), root, rest, limits)
    return errors


def descend_columns(
    slope: torch.Tensor,
    scales: torch.Tensor,
    hessian: torch.Tensor,
    codes: torch.Tensor,
    limits: tuple[int, int],
) -> torch.Tensor:
    """How far each weight moved, fp32 [C, N]; changes `codes` in place. Shapes as gptq_columns."""
    moves = torch.empty_like(slope)
    _launch("descend_columns", (slope, scales, hessian, codes, moves), hessian, slope, limits)
    return moves


def _launch(
    entry: str,
    tensors: tuple[torch.Tensor | None, ...],
    matrix: torch.Tensor,
    block: torch.Tensor,
    limits: tuple[int, int],
) -> None:
    count, rows = block.shape
    if count > MOST_COLUMNS or matrix.stride(1) != 1:
        raise ValueError(f"a block has at most {MOST_COLUMNS} columns, and matrices are row-major")
    low, high = (float(limit) for limit in limits)
    grid = (-(-rows // WARPS), 1, 1)
    numbers = (rows, count, matrix.stride(0), low, high)
    _kernel(entry).launch(grid, (THREADS, 1, 1), *tensors, *numbers)
