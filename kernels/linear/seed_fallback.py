"""The seed's old prompt path, kept to be measured against: unpack in torch, then cuBLAS.

A chunk of out-features is made dense by torch's bit operations in fp16, a dozen passes over memory,
and multiplied. Nothing chooses it; kernels/linear/dequantise_cublas.py does the same in one pass.
"""

from __future__ import annotations

import torch

from kernels.pack.dequantise import per_column, slice_rows, unpack_codes
from kernels.pack.packed_linear import PackedLinear

CHUNK_ROWS = 1024
"""Out-features at once. The seed does not say how many it used; this is our guess."""


class SeedFallback:
    """One layer. The names are the seed's, less their underscores; act-order is not supported."""

    def __init__(self, layer: PackedLinear) -> None:
        self.layer = layer

    def dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        """fp16 [end - start, K]."""
        part = slice_rows(self.layer, start, end)
        codes = unpack_codes(part).half()
        if part.zeros is not None:
            codes -= per_column(part.zeros, part).half()
        codes *= part.scales.repeat_interleave(part.group_size, dim=1)[:, : part.in_features]
        if part.offsets is not None:
            codes += per_column(part.offsets, part).half()
        return codes

    def dequantize(self) -> torch.Tensor:
        """fp16 [N, K]."""
        return self.dequantize_rows(0, self.layer.out_features)

    def forward_dequant_cublas(self, x: torch.Tensor) -> torch.Tensor:
        """x fp16 [M, K] -> y fp16 [M, N]."""
        rows = self.layer.out_features
        y = torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
        for start in range(0, rows, CHUNK_ROWS):
            end = min(start + CHUNK_ROWS, rows)
            y[:, start:end] = torch.nn.functional.linear(x, self.dequantize_rows(start, end))
        return y if self.layer.bias is None else y + self.layer.bias.to(y.dtype)
