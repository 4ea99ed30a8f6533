"""GGUF blocks to our layers, without loss.

Q4_1 block: f16 d, f16 m, 16 bytes; low nibbles are values 0..15, high nibbles 16..31; w = d*u + m.
Q8_0 block: f16 d, 32 x i8; w = d*q. Knows no names and no files.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_actor.load.refusal import refusal
from engine_actor.ops import PackedLinear

GROUP = 32


def unpack_q4_1(name: str, raw: bytes, rows: int, columns: int) -> PackedLinear:
    """Q4_1 bytes of a [rows, columns] matrix as a 4-bit layer with offsets.

    Our codes are u - 8, so the offset is m + 8d. It is an f16 number nearly always (m is about
    -8d, and such differences are exact); a matrix with a block where it is not gets f32 offsets.
    Raises CheckpointError where not even f32 holds it.
    """
    blocks = np.frombuffer(raw, np.uint8).reshape(rows, columns // GROUP, 20)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    minima = np.ascontiguousarray(blocks[..., 2:4]).view("<f2")[..., 0]
    low, high = blocks[..., 4:] & 15, blocks[..., 4:] >> 4
    codes = np.empty((rows, columns // GROUP, 16), np.uint8)
    codes[..., :8] = low[..., 0::2] | (low[..., 1::2] << 4)
    codes[..., 8:] = high[..., 0::2] | (high[..., 1::2] << 4)
    codes ^= 0x88  # unsigned u to two's complement u - 8, both nibbles at once
    return PackedLinear(
        4,
        GROUP,
        columns,
        torch.from_numpy(codes.reshape(rows, columns // 2)),
        torch.from_numpy(scales.astype(np.float16)),
        offsets=torch.from_numpy(_exact_offsets(name, scales, minima)),
    )


def _exact_offsets(name: str, scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    exact = minima.astype(np.float64) + 8.0 * scales.astype(np.float64)
    if not np.isfinite(exact).all():
        raise refusal(name, "a Q4_1 block has a scale or minimum that is not finite")
    for dtype in (np.float16, np.float32):
        with np.errstate(over="ignore"):
            offsets = exact.astype(dtype)
        if (offsets == exact).all():
            return offsets
    raise refusal(name, "a Q4_1 block's minimum and scale are too far apart to carry over exactly")


def unpack_q8_0(raw: bytes, rows: int, columns: int) -> PackedLinear:
    """Q8_0 bytes of a [rows, columns] matrix as an 8-bit layer."""
    blocks = np.frombuffer(raw, np.uint8).reshape(rows, columns // GROUP, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    codes = np.ascontiguousarray(blocks[..., 2:]).reshape(rows, columns)
    return PackedLinear(
        8, GROUP, columns, torch.from_numpy(codes), torch.from_numpy(scales.astype(np.float16))
    )


def read_floats(kind: str, raw: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """F32 or F16 bytes as a tensor of that dtype."""
    values = np.frombuffer(raw, "<f4" if kind == "F32" else "<f2").reshape(shape)
    return torch.from_numpy(values.copy())


def select_rows(layer: PackedLinear, order: torch.Tensor) -> PackedLinear:
    """The same layer with row i taken from row order[i]."""
    return PackedLinear(
        layer.bits,
        layer.group,
        layer.in_features,
        layer.qweight[order],
        layer.scales[order],
        offsets=None if layer.offsets is None else layer.offsets[order],
    )
