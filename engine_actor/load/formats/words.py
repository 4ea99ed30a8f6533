"""Codes inside 32-bit words, as GPTQ, AWQ and compressed-tensors store them, and as our bytes.

All of them are unsigned (q + 2^(bits-1)) where ours are two's complement: one XOR apart. Knows no
tensor names and no checkpoint.
"""

from __future__ import annotations

import torch

from engine_actor.ops import pack_codes

_FLIP = {4: (0x88,), 3: (0x24, 0x49, 0x92), 8: (0x80,)}
"""The sign bits of a whole number of codes: XOR turns unsigned into two's complement."""


def unpack_stream(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """i32[R, W], a little-endian bit stream along the row -> unsigned codes i16[R, count].

    Bit `bits * k` of the stream is the lowest of code k, so a 3-bit code may straddle two words.
    """
    raw = _bytes(words)
    if bits == 8:
        return raw[:, :count].to(torch.int16)
    if bits == 4:
        return torch.stack((raw & 15, raw >> 4), -1).flatten(1)[:, :count].to(torch.int16)
    # Eight codes to three bytes.
    padded = torch.nn.functional.pad(raw, (0, -raw.shape[1] % 3)).to(torch.int32)
    first, second, third = padded.view(len(raw), -1, 3).unbind(-1)
    triple = (first | second << 8 | third << 16).unsqueeze(-1)
    shifts = torch.arange(0, 24, 3, dtype=torch.int32)
    return ((triple >> shifts) & 7).flatten(1)[:, :count].to(torch.int16)


def unpack_padded(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """i32[R, W], 32 // bits codes in each word and the rest unused -> unsigned i16[R, count]."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count].to(torch.int16)


def signed_bytes(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """i32[N, W], a bit stream of unsigned codes -> u8[N, ceil(columns * bits / 8)] as PackedLinear
    has them. Bits after the last code become zero.
    """
    used = columns * bits
    raw = _bytes(words)[:, : -(-used // 8)]
    flip = torch.tensor(_FLIP[bits], dtype=torch.uint8)
    packed = raw ^ flip.repeat(-(-raw.shape[1] // len(flip)))[: raw.shape[1]]
    if used % 8:
        packed[:, -1] &= (1 << used % 8) - 1
    return packed


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """i32[R, W] -> u8[R, 4 * W]. Flat in between: torch takes a transposed row of a single word for
    contiguous and then refuses it.
    """
    return words.contiguous().flatten().view(torch.uint8).view(len(words), -1)


def pack_unsigned(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes [N, K] -> the same bytes."""
    return pack_codes(codes - (1 << (bits - 1)), bits)
