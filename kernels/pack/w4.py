"""4-bit codes: two to a byte, the even column in the low half. Two's complement, -8..7.

Torch only, any device; the bytes are what every checkpoint reader and every kernel agrees on.
"""

from __future__ import annotations

import torch

LOW, HIGH = -8, 7


def pack_w4(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] of any integer dtype in -8..7 -> u8[N, ceil(K / 2)].

    An odd K leaves the last high half zero. Raises ValueError on a code out of range.
    """
    require_codes(codes, LOW, HIGH)
    half = torch.nn.functional.pad(codes.to(torch.int8), (0, codes.shape[-1] % 2)).to(torch.uint8)
    half = half & 0x0F
    return half[:, 0::2] | (half[:, 1::2] << 4)


def unpack_w4(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """u8[N, ceil(columns / 2)] -> codes i8[N, columns]."""
    halves = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(1)[:, :columns]
    # Subtracting 8 after flipping the sign bit sign-extends without a branch.
    return (halves ^ 0x08).to(torch.int8) - 8


def require_codes(codes: torch.Tensor, low: int, high: int) -> None:
    """Raises ValueError unless codes is [N, K] with every value in low..high."""
    if codes.ndim != 2:
        raise ValueError(f"codes must be [N, K], got shape {tuple(codes.shape)}")
    if codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
        raise ValueError(
            f"codes must be in {low}..{high}, got {int(codes.min())}..{int(codes.max())}"
        )
