"""Second opinions of the loading tests, written without our readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kernels.pack.packed_linear import PackedLinear


def dequantise(layer: PackedLinear) -> np.ndarray:
    """fp32 [N, K] by the words of PackedLinear: bit by bit, group by group."""
    codes = _codes(layer)
    rows, groups = layer.scales.shape
    padding = groups * layer.group_size - layer.in_features
    q = np.pad(codes, ((0, 0), (0, padding))).reshape(rows, groups, -1).astype(np.float32)
    if layer.zeros is not None:
        q -= layer.zeros.float().numpy()[..., None]
    q *= layer.scales.float().numpy()[..., None]
    if layer.offsets is not None:
        q += layer.offsets.float().numpy()[..., None]
    matrix = q.reshape(rows, -1)[:, : layer.in_features]
    if layer.perm is None:
        return matrix
    restored = np.empty_like(matrix)
    restored[:, layer.perm.numpy()] = matrix
    return restored


def _codes(layer: PackedLinear) -> np.ndarray:
    """Signed codes [N, K]. Whole nibbles and bytes have a short way: the demo has 1.3e8 of them."""
    raw, columns = layer.qweight.numpy(), layer.in_features
    if layer.bits == 8:
        return raw.view(np.int8)
    if layer.bits == 4:
        nibbles = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)[:, :columns]
        return (nibbles ^ 8).astype(np.int8) - 8
    stream = np.unpackbits(raw, axis=1, bitorder="little")[:, : columns * layer.bits]
    bits = stream.reshape(len(raw), columns, layer.bits).astype(np.int16)
    codes = (bits << np.arange(layer.bits, dtype=np.int16)).sum(-1)
    half = 1 << (layer.bits - 1)
    return np.where(codes >= half, codes - 2 * half, codes)


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A file with exactly this header, however wrong. A str header is taken as it is."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))
