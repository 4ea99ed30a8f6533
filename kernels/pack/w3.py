"""3-bit codes: eight to three bytes, a little-endian bit stream along K. Two's complement, -4..3.

Torch only, any device; bit 3*k of the stream is the lowest bit of column k.
"""

from __future__ import annotations

import torch

from kernels.pack.w4 import require_codes

LOW, HIGH = -4, 3
CODES_PER_WORD, BYTES_PER_WORD = 8, 3


def pack_w3(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] of any integer dtype in -4..3 -> u8[N, ceil(K * 3 / 8)].

    Bits after the last code are zero. Raises ValueError on a code out of range.
    """
    require_codes(codes, LOW, HIGH)
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes.to(torch.int32), (0, -columns % CODES_PER_WORD))
    words = (padded & 0x7).view(rows, -1, CODES_PER_WORD)
    shifts = torch.arange(CODES_PER_WORD, dtype=torch.int32, device=codes.device) * 3
    stream = (words << shifts).sum(-1, dtype=torch.int32)
    packed = torch.stack([(stream >> (8 * i)) & 0xFF for i in range(BYTES_PER_WORD)], dim=-1)
    return packed.to(torch.uint8).flatten(1)[:, : -(-columns * 3 // 8)].contiguous()


def unpack_w3(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """u8[N, ceil(columns * 3 / 8)] -> codes i8[N, columns]."""
    rows, stored = packed.shape
    padded = torch.nn.functional.pad(packed, (0, -stored % BYTES_PER_WORD)).to(torch.int32)
    first, second, third = padded.view(rows, -1, BYTES_PER_WORD).unbind(-1)
    stream = (first | (second << 8) | (third << 16)).unsqueeze(-1)
    shifts = torch.arange(CODES_PER_WORD, dtype=torch.int32, device=packed.device) * 3
    codes = (stream >> shifts) & 0x7
    # Flip the sign bit, then subtract its weight: sign extension of a 3-bit value.
    return ((codes ^ 0x4) - 4).to(torch.int8).flatten(1)[:, :columns]
