"""Second opinions of the loading tests, written without our readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.pack.packed_linear import PackedLinear


def dequantise(layer: PackedLinear) -> np.ndarray:
    """fp32 [N, K] by the words of PackedLinear: bit by bit, group by group."""
    stream = np.unpackbits(layer.qweight.numpy(), axis=1, bitorder="little")
    bits = stream[:, : layer.in_features * layer.bits].reshape(len(stream), -1, layer.bits)
    codes = (bits << np.arange(layer.bits, dtype=np.int16)).sum(-1)
    codes = np.where(codes >= 1 << (layer.bits - 1), codes - (1 << layer.bits), codes)
    group = np.arange(layer.in_features) // layer.group_size

    def spread(tensor: torch.Tensor) -> np.ndarray:
        return tensor.float().numpy()[:, group]

    q = codes.astype(np.float32)
    if layer.zeros is not None:
        q = q - spread(layer.zeros)
    w = spread(layer.scales) * q
    return w if layer.offsets is None else w + spread(layer.offsets)


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A file with exactly this header, however wrong. A str header is taken as it is."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))
