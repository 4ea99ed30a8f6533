"""AWQ checkpoints: every code, scale and zero point, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_actor.ops import PackedLinear
from tests.load.foreign import (
    Grid,
    awq,
    write_foreign,
)
from tests.load.foreign_checks import WIDE, assert_equal, draw_with, read_weights
from tests.load.oracle import dequantise

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("group", [-1, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(tmp_path: Path, group: int, symmetric: bool) -> None:
    section = {**AWQ, "group_size": group}
    matrices = write_foreign(tmp_path, section, awq, draw_with(4, group, symmetric), **WIDE)
    weights = read_weights(tmp_path)
    assert_equal(weights, matrices)
    qkv = weights["layers.0.qkv"]
    assert isinstance(qkv, PackedLinear)
    assert (qkv.bits, qkv.group, qkv.zeros is None) == (4, group, symmetric)


def test_awq_golden_word(tmp_path: Path) -> None:
    """B-17. By hand: columns 0..7 of the output with codes 0..7 are the word 0x75316420, for
    weights and for zero points; zero points of 0 stay 0.
    """

    def pack(grid: Grid) -> dict[str, np.ndarray]:
        tensors = awq(grid)
        tensors["qweight"] = np.full_like(tensors["qweight"], 0x75316420)
        tensors["qzeros"] = np.full_like(tensors["qzeros"], 0x75316420)
        return tensors

    write_foreign(tmp_path, AWQ, pack, draw_with(4, 32, False))
    layer = read_weights(tmp_path)["layers.0.o"]
    assert isinstance(layer, PackedLinear)
    assert layer.zeros is not None
    assert layer.zeros[:9, 0].tolist() == [-8, -7, -6, -5, -4, -3, -2, -1, -8]
    assert layer.qweight[:9, 0].tolist() == [0x88, 0x99, 0xAA, 0xBB, 0xCC, 0xDD, 0xEE, 0xFF, 0x88]
    assert not dequantise(layer).any()
