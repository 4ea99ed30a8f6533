"""GGUF blocks of 32 values to our layers, without loss. Knows no names and no files.

A block is f16 d, then (Q4_1, Q5_1) f16 m, then (Q5_0, Q5_1) u32 whose bit i is the fifth bit of
value i, then 16 bytes whose low nibbles are values 0..15 and high nibbles 16..31; Q8_0 has 32 x i8.
Q4_0: w = d * (u - 8). Q5_0: w = d * (u - 16). Q4_1, Q5_1: w = d * u + m. Q8_0: w = d * q.
Five bits are kept in eight: u - 16 is a code of ours.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_actor.load.refusal import refusal
from engine_actor.ops import PackedLinear

GROUP = 32
Bytes = bytes | memoryview
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FLOAT_TYPES = tuple(_FLOATS)


def unpack_q4_0(name: str, raw: Bytes, rows: int, columns: int) -> PackedLinear:
    """Q4_0 bytes of a [rows, columns] matrix as a 4-bit layer. Raises CheckpointError."""
    blocks = _blocks(raw, rows, columns, 18)
    scales = _halves(name, blocks, 0)
    return _layer(4, columns, _nibbles(blocks[..., 2:]), scales)


def unpack_q4_1(name: str, raw: Bytes, rows: int, columns: int) -> PackedLinear:
    """Q4_1 bytes of a [rows, columns] matrix as a 4-bit layer with offsets.

    Our codes are u - 8, so the offset is m + 8d. It is an f16 number nearly always (m is about
    -8d, and such differences are exact); a matrix with a block where it is not gets f32 offsets.
    Raises CheckpointError where not even f32 holds it.
    """
    blocks = _blocks(raw, rows, columns, 20)
    scales, minima = _halves(name, blocks, 0), _halves(name, blocks, 2)
    return _layer(
        4, columns, _nibbles(blocks[..., 4:]), scales, _exact_offsets(name, scales, minima, 8)
    )


def unpack_q5_0(name: str, raw: Bytes, rows: int, columns: int) -> PackedLinear:
    """Q5_0 bytes of a [rows, columns] matrix as an 8-bit layer. Raises CheckpointError."""
    blocks = _blocks(raw, rows, columns, 22)
    codes = _five_bits(blocks[..., 2:6], blocks[..., 6:])
    return _layer(8, columns, codes, _halves(name, blocks, 0))


def unpack_q5_1(name: str, raw: Bytes, rows: int, columns: int) -> PackedLinear:
    """Q5_1 bytes of a [rows, columns] matrix as an 8-bit layer with offsets m + 16d, as Q4_1."""
    blocks = _blocks(raw, rows, columns, 24)
    scales, minima = _halves(name, blocks, 0), _halves(name, blocks, 2)
    codes = _five_bits(blocks[..., 4:8], blocks[..., 8:])
    return _layer(8, columns, codes, scales, _exact_offsets(name, scales, minima, 16))


def unpack_q8_0(name: str, raw: Bytes, rows: int, columns: int) -> PackedLinear:
    """Q8_0 bytes of a [rows, columns] matrix as an 8-bit layer. Raises CheckpointError."""
    blocks = _blocks(raw, rows, columns, 34)
    return _layer(8, columns, np.ascontiguousarray(blocks[..., 2:]), _halves(name, blocks, 0))


def _blocks(raw: Bytes, rows: int, columns: int, size: int) -> np.ndarray:
    return np.frombuffer(raw, np.uint8).reshape(rows, columns // GROUP, size)


def _halves(name: str, blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at byte `at` of every block, f16[rows, blocks]."""
    halves = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float16)
    if not np.isfinite(halves).all():
        raise refusal(name, "a block has a scale or minimum that is not finite")
    return halves


def _nibbles(low_and_high: np.ndarray) -> np.ndarray:
    """16 bytes per block, halves of a block apart -> 16 bytes in the order of our 4-bit layers."""
    low, high = low_and_high & 15, low_and_high >> 4
    codes = np.empty_like(low)
    codes[..., :8] = low[..., 0::2] | (low[..., 1::2] << 4)
    codes[..., 8:] = high[..., 0::2] | (high[..., 1::2] << 4)
    return codes ^ 0x88  # unsigned u to two's complement u - 8, both nibbles at once


def _five_bits(fifth: np.ndarray, low_and_high: np.ndarray) -> np.ndarray:
    """Codes u - 16 of each block as bytes in order."""
    low = np.concatenate([low_and_high & 15, low_and_high >> 4], axis=-1)
    high = np.unpackbits(np.ascontiguousarray(fifth), axis=-1, bitorder="little")
    return (low | high << 4) - np.uint8(16)


def _layer(
    bits: int,
    columns: int,
    codes: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray | None = None,
) -> PackedLinear:
    return PackedLinear(
        bits,
        GROUP,
        columns,
        torch.from_numpy(codes.reshape(len(codes), -1)),
        torch.from_numpy(scales),
        offsets=None if offsets is None else torch.from_numpy(offsets),
    )


def _exact_offsets(name: str, scales: np.ndarray, minima: np.ndarray, middle: int) -> np.ndarray:
    exact = minima.astype(np.float64) + middle * scales.astype(np.float64)
    for dtype in (np.float16, np.float32):
        with np.errstate(over="ignore"):
            offsets = exact.astype(dtype)
        if (offsets == exact).all():
            return offsets
    raise refusal(name, "a block's minimum and scale are too far apart to carry over exactly")


def read_floats(kind: str, raw: Bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """F32, F16 or BF16 bytes as a tensor of that dtype."""
    return torch.frombuffer(bytearray(raw), dtype=_FLOATS[kind]).view(shape)


def select_rows(layer: PackedLinear, order: torch.Tensor) -> PackedLinear:
    """The same layer with row i taken from row order[i]."""
    return PackedLinear(
        layer.bits,
        layer.group,
        layer.in_features,
        layer.qweight[order],
        layer.scales[order],
        offsets=None if layer.offsets is None else layer.offsets[order],
        bias=None if layer.bias is None else layer.bias[order],
    )
