"""Checkpoints as other programs pack them, written from the formats' published layouts.

Bit by bit in numpy and without a line of ours, so that a reader cannot agree with its own mistake.
The layouts were held once against AutoGPTQ 0.7.1's, AutoAWQ 0.2.9's and compressed-tensors 0.9.4's
own pack routines, which want CUDA builds or old versions of what else is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engine_actor.load.tiny import write_tiny

AWQ_NUMBER_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Grid:
    """One quantised matrix: unsigned codes [N, K], unsigned zero points and scales [N, G]."""

    bits: int
    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    g_idx: np.ndarray

    def matrix(self) -> np.ndarray:
        """fp32 [N, K]."""
        scales = self.scales.astype(np.float32)[:, self.g_idx]
        return (self.codes.astype(np.float32) - self.zeros[:, self.g_idx]) * scales


def random_grid(
    rows: int, columns: int, bits: int, group: int, symmetric: bool, act_order: bool, seed: int
) -> Grid:
    """Codes over the whole range, scales of both signs, zero points 0 and the largest among them.

    act_order: which columns share a group is random.
    """
    rng = np.random.default_rng(seed)
    size = columns if group == -1 else group
    groups = -(-columns // size)
    codes = rng.integers(0, 1 << bits, (rows, columns))
    zeros = rng.integers(0, 1 << bits, (rows, groups))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = (rng.random((rows, groups)) + 0.5) * rng.choice([-0.01, 0.01], (rows, groups))
    g_idx = np.arange(columns) // size
    return Grid(
        bits,
        codes,
        zeros,
        scales.astype(np.float16),
        rng.permutation(g_idx) if act_order else g_idx,
    )


def bit_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned [R, K] -> i32[R, ceil(K * bits / 32)], lowest bit first, no gaps."""
    each = (codes[..., None].astype(np.uint8) >> np.arange(bits)) & 1
    flat = each.reshape(len(codes), -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.packbits(flat, axis=1, bitorder="little").view("<i4")


def whole_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned [R, K] -> i32[R, ceil(K / (32 // bits))], the highest bits of a word unused."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word))).astype(np.uint64)
    lanes = padded.reshape(len(codes), -1, per_word) << (np.arange(per_word) * bits).astype(
        np.uint64
    )
    return lanes.sum(-1).astype(np.uint32).view(np.int32)


def gptq(grid: Grid, stored_less: int = 1) -> dict[str, np.ndarray]:
    """qweight, qzeros, scales, g_idx. stored_less: 1 as version 1 has it, 0 for version 2."""
    zeros = (grid.zeros - stored_less) % (1 << grid.bits)
    return {
        "qweight": bit_stream(grid.codes, grid.bits).T,
        "qzeros": bit_stream(zeros.T, grid.bits),
        "scales": grid.scales.T,
        "g_idx": grid.g_idx.astype(np.int32),
    }


def awq(grid: Grid) -> dict[str, np.ndarray]:
    """qweight, qzeros, scales of the GEMM version."""

    def words(values: np.ndarray) -> np.ndarray:
        eights = values.reshape(len(values), -1, 8)[..., AWQ_NUMBER_OF_NIBBLE]
        return bit_stream(eights.reshape(values.shape), 4)

    return {
        "qweight": words(grid.codes.T),
        "qzeros": words(grid.zeros.T),
        "scales": grid.scales.T,
    }


def compressed(grid: Grid, symmetric: bool = True, straddle: bool = True) -> dict[str, np.ndarray]:
    """weight_packed, weight_scale, weight_shape, weight_zero_point and weight_g_idx."""
    pack = bit_stream if straddle else whole_codes
    tensors = {
        "weight_packed": pack(grid.codes, grid.bits),
        "weight_scale": grid.scales,
        "weight_shape": np.array(grid.codes.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(grid.zeros.T, grid.bits).T
    if not np.array_equal(grid.g_idx, np.sort(grid.g_idx)):
        tensors["weight_g_idx"] = grid.g_idx.astype(np.int32)
    return tensors


def write_foreign(
    folder: Path,
    section: dict[str, Any],
    pack: Callable[[Grid], dict[str, np.ndarray]],
    draw: Callable[[int, int, int], Grid],
    family: str = "llama",
    **overrides: Any,
) -> dict[str, np.ndarray]:
    """A one-layer checkpoint whose seven linears are packed; embedding and head stay dense.

    draw: (rows, columns, seed) -> the grid of one linear. Returns the fp32 matrix of each.
    """
    write_tiny(folder, family, num_hidden_layers=1, **overrides)
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    matrices: dict[str, np.ndarray] = {}
    for seed, name in enumerate(sorted(tensors)):
        base = name.removesuffix(".weight")
        if base == name or not base.endswith("_proj"):
            continue
        rows, columns = tensors.pop(name).shape
        grid = draw(rows, columns, seed)
        matrices[base] = grid.matrix()
        for field, value in pack(grid).items():
            tensors[f"{base}.{field}"] = torch.from_numpy(np.ascontiguousarray(value))
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return matrices
