"""GGUF super-blocks of 256 values (K-quants) to our layers: codes exact, scales rounded to f16.

Q4_K, Q5_K: eight groups of 32 with w = (d * sc) * u - (dmin * mn), sc and mn of 6 bits. Q3_K and
Q6_K: sixteen groups of 16 with w = (d * sc) * (u - 4 or 32), sc of 6 bits or i8. d and dmin: f16.

Why not exact: d * sc needs up to 11 + 8 bits of mantissa, our scales have the 11 of f16. Below the
smallest normal f16 the product is a multiple of 2^-24, as every f16 is, and so exact; above it is
rounded once, by at most 2^-11 of itself. The offset is taken against the rounded scale, so only its
own rounding is added: |error| <= 2^-11 (|s * u| + |o|). On a real 1.5B file that is 5e-4 of the
weights' size, a third of what rounding the matrix to bf16 would cost. Knows no names and no files.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_actor.load.formats.gguf_blocks import Bytes
from engine_actor.load.refusal import refusal
from engine_actor.ops import PackedLinear, pack_codes

SUPER = 256
NOTE = "scales rounded to f16"


def unpack_q3_k(name: str, raw: Bytes, rows: int, columns: int) -> PackedLinear:
    """Q3_K bytes of a [rows, columns] matrix as a 3-bit layer, group 16. Raises CheckpointError.

    Block: 32 bytes whose bit i is the third bit of the i-th 32 values, 64 bytes of bit pairs, 12
    bytes of sc + 32, f16 d; each half of 128 values is the bit pairs 0, 1, 2, 3 of 32 bytes.
    """
    blocks = _blocks(raw, rows, columns, 110)
    third = (blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    pairs = blocks[..., 32:96].reshape(*blocks.shape[:2], 2, 1, 32)
    pairs = (pairs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    codes = (pairs.reshape(third.shape) | third << 2).astype(np.int8) - 4
    scales = _product(name, blocks[..., 108:110], _sixteen_factors(blocks[..., 96:108]))
    packed = pack_codes(torch.from_numpy(codes.reshape(rows, columns)), 3)
    return _layer(name, 3, 16, columns, packed.numpy(), scales, None)


def _sixteen_factors(packed: np.ndarray) -> np.ndarray:
    """12 bytes per block -> sixteen signed factors: low nibbles, high nibbles, and four bytes with
    their upper bit pairs, sc of four groups a pair.
    """
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high = (packed[..., None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    return (low | high.reshape(low.shape) << 4).astype(np.int8) - 32


def unpack_q4_k(name: str, raw: Bytes, rows: int, columns: int) -> PackedLinear:
    """Q4_K bytes of a [rows, columns] matrix as a 4-bit layer, group 32, with offsets.

    Block: f16 d, f16 dmin, 12 bytes of sc and mn, 4 x 32 bytes; low nibbles of the i-th 32 are
    group 2i, high nibbles group 2i + 1. Raises CheckpointError.
    """
    blocks = _blocks(raw, rows, columns, 144)
    codes = _pairs_of_groups(blocks[..., 16:])
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    packed ^= 0x88  # unsigned u to two's complement u - 8, both nibbles at once
    return _with_minima(name, blocks, 4, columns, packed, middle=8)


def unpack_q5_k(name: str, raw: Bytes, rows: int, columns: int) -> PackedLinear:
    """Q5_K bytes as an 8-bit layer, group 32, with offsets. As Q4_K, with 32 bytes before the
    nibbles whose bit i is the fifth bit of group i. Raises CheckpointError.
    """
    blocks = _blocks(raw, rows, columns, 176)
    fifth = (blocks[..., 16:48, None] >> np.arange(8, dtype=np.uint8)) & 1
    codes = _pairs_of_groups(blocks[..., 48:]) | (fifth.swapaxes(-1, -2) << 4)
    codes -= 16
    return _with_minima(name, blocks, 8, columns, codes, middle=16)


def unpack_q6_k(name: str, raw: Bytes, rows: int, columns: int) -> PackedLinear:
    """Q6_K bytes as an 8-bit layer, group 16. Block: 128 bytes of low nibbles, 64 of bit pairs,
    16 x i8 sc, f16 d; each half of 128 values is four runs of 32: (low, low, high, high nibbles of
    64 bytes; bit pairs 0, 1, 2, 3 of 32 bytes). Raises CheckpointError.
    """
    blocks = _blocks(raw, rows, columns, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 2, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=-3)
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    pairs = (pairs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    codes = nibbles.reshape(pairs.shape) | pairs << 4
    factors = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    scales = _product(name, blocks[..., 208:210], factors)
    codes -= 32
    return _layer(name, 8, 16, columns, codes, scales, None)


def _blocks(raw: Bytes, rows: int, columns: int, size: int) -> np.ndarray:
    return np.frombuffer(raw, np.uint8).reshape(rows, columns // SUPER, size)


def _pairs_of_groups(nibbles: np.ndarray) -> np.ndarray:
    """128 bytes per block -> unsigned codes [rows, blocks, 8, 32]."""
    runs = nibbles.reshape(*nibbles.shape[:2], 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=-2).reshape(*nibbles.shape[:2], 8, 32)


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes per block -> sc and mn of its eight groups: four plain ones each, whose upper two
    bits are those of the later four.
    """
    first, second, low = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (low & 15) | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, (low >> 4) | (second >> 6) << 4], axis=-1)
    return scales, minima


def _product(name: str, halves: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """f16 of each block times its groups' small integers: exact, f64[rows, groups]."""
    values = np.ascontiguousarray(halves).view("<f2").astype(np.float64)
    if not np.isfinite(values).all():
        raise refusal(name, "a super-block has a scale that is not finite")
    return (values * factors).reshape(len(factors), -1)


def _with_minima(
    name: str, blocks: np.ndarray, bits: int, columns: int, codes: np.ndarray, middle: int
) -> PackedLinear:
    factors, minima = _six_bits(blocks[..., 4:16])
    scales = _product(name, blocks[..., :2], factors)
    offsets = -_product(name, blocks[..., 2:4], minima)
    with np.errstate(over="ignore"):
        offsets += middle * scales.astype(np.float16).astype(np.float64)
    return _layer(name, bits, 32, columns, codes, scales, offsets)


def _layer(
    name: str,
    bits: int,
    group: int,
    columns: int,
    codes: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray | None,
) -> PackedLinear:
    def half(values: np.ndarray) -> torch.Tensor:
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float16)
        if not np.isfinite(rounded).all():
            raise refusal(name, "a group's scale is beyond f16")
        return torch.from_numpy(rounded)

    return PackedLinear(
        bits,
        group,
        columns,
        torch.from_numpy(codes.reshape(len(codes), -1)),
        half(scales),
        offsets=None if offsets is None else half(offsets),
    )
