"""Token ids to hidden states: a table of rows, dense, or 8-bit codes of which only the rows asked
for are ever dequantised.
"""

from __future__ import annotations

import torch

from engine_actor import ops

Table = torch.Tensor | ops.DenseLinear | ops.PackedLinear


class Embedding:
    """ids i64[T] -> [T, hidden] in `dtype`."""

    def __init__(self, table: Table, dtype: torch.dtype) -> None:
        self._table = table.weight if isinstance(table, ops.DenseLinear) else table
        self._dtype = dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self._table, ops.PackedLinear):
            if ids.device.type == "cuda":
                return ops.gather_rows_cuda(self._table, ids, self._dtype)
            return ops.gather_rows(self._table, ids).to(self._dtype)
        return self._table.index_select(0, ids).to(self._dtype)
