"""A decode batch put where a captured graph reads it: fixed tensors for a fixed number of rows.

One kernel on CUDA (stage.cu); torch elsewhere, which is also what the kernel is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant

SOURCE = CudaSource("kv/stage.cu")
ENTRY = "stage_decode"
THREADS = 128
VARIANT = Variant(SOURCE, ENTRY, max_registers=40, threads=THREADS)
SHIPPED = (VARIANT,)


@cache
def _kernel() -> Kernel:
    return VARIANT.kernel()


@dataclass(frozen=True, slots=True, eq=False)
class StagedRows:
    """B rows at fixed addresses: ids and slots i64[B], slots -1 for padding; lengths i32[B], keys
    of each row, 0 for padding; tables i32[B, width]; cos and sin f32[B, 1, head_dim].
    """

    ids: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def empty(cls, rows: int, width: int, head_dim: int, device: torch.device) -> StagedRows:
        """All of it padding."""
        wide = torch.zeros(2, rows, dtype=torch.int64, device=device)
        wide[1] = -1
        return cls(
            wide[0],
            wide[1],
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, width, dtype=torch.int32, device=device),
            torch.zeros(rows, 1, head_dim, device=device),
            torch.zeros(rows, 1, head_dim, device=device),
        )

    def first(self, rows: int, width: int) -> StagedRows:
        """The same memory for fewer rows and narrower tables."""
        return StagedRows(
            self.ids[:rows],
            self.slots[:rows],
            self.lengths[:rows],
            self.tables.view(-1)[: rows * width].view(rows, width),
            self.cos[:rows],
            self.sin[:rows],
        )


def stage_decode(
    to: StagedRows,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Fill `to` with a batch of at most its rows, padding behind them. ids, positions, slots
    i64[R]; tables i32[R, W]; rotary: cos and sin f32[P, head_dim] with P above all positions.
    """
    rows, width = tables.shape
    cos, sin = rotary
    batch, out_width = to.tables.shape
    if not ids.is_cuda:
        _stage_by_torch(to, ids, positions, slots, tables, rotary)
        return
    _kernel().launch(
        (batch, 1, 1),
        (THREADS, 1, 1),
        ids,
        positions,
        slots,
        tables,
        cos,
        sin,
        to.ids,
        to.slots,
        to.lengths,
        to.tables,
        to.cos,
        to.sin,
        rows,
        width,
        out_width,
        cos.shape[1],
    )


def _stage_by_torch(
    to: StagedRows,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> None:
    rows, width = tables.shape[0], min(tables.shape[1], to.tables.shape[1])
    to.ids[:rows], to.ids[rows:] = ids, 0
    to.slots[:rows], to.slots[rows:] = slots, -1
    to.lengths[:rows], to.lengths[rows:] = positions + 1, 0
    to.tables[:rows, :width] = tables[:, :width]
    for there, table in zip((to.cos, to.sin), rotary, strict=True):
        there[:rows, 0], there[rows:, 0] = table[positions], table[0]
