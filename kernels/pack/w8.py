"""8-bit codes: one to a byte, two's complement. A view of the same bytes, never a copy."""

from __future__ import annotations

import torch

from kernels.pack.w4 import require_codes

LOW, HIGH = -128, 127


def pack_w8(codes: torch.Tensor) -> torch.Tensor:
    """Integer codes [N, K] in -128..127 -> u8[N, K]. Raises ValueError out of range."""
    require_codes(codes, LOW, HIGH)
    return codes.to(torch.int8).contiguous().view(torch.uint8)


def unpack_w8(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """u8[N, columns] -> codes i8[N, columns]."""
    return packed[:, :columns].view(torch.int8)
