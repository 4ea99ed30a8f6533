"""compressed-tensors layouts old and new, and what the library does not write any more."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_actor.ops import PackedLinear
from tests.load.foreign import (
    Grid,
    compressed,
    random_grid,
    write_foreign,
)
from tests.load.foreign_checks import WIDE, assert_equal, draw_with, read_weights
from tests.load.oracle import edit_json


def _compressed_section(
    bits: int, group: int, symmetric: bool, strategy: str = "group"
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group if strategy == "group" else None,
        "actorder": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


@pytest.mark.parametrize("straddle", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group"), [(3, 32), (3, 128), (4, 64), (4, 128), (4, -1), (8, 32), (3, -1), (8, -1)]
)
def test_compressed_tensors(
    tmp_path: Path, bits: int, group: int, symmetric: bool, straddle: bool
) -> None:
    strategy = "channel" if group == -1 else "group"
    section = _compressed_section(bits, group, symmetric, strategy)
    pack = partial(compressed, symmetric=symmetric, straddle=straddle)
    matrices = write_foreign(tmp_path, section, pack, draw_with(bits, group, symmetric), **WIDE)
    weights = read_weights(tmp_path)
    assert_equal(weights, matrices)
    qkv = weights["layers.0.qkv"]
    assert isinstance(qkv, PackedLinear)
    assert (qkv.bits, qkv.group, qkv.zeros is None) == (bits, group, symmetric)


@pytest.mark.parametrize("straddle", [True, False])
def test_compressed_tensors_with_reordered_columns(tmp_path: Path, straddle: bool) -> None:
    section = _compressed_section(3, 32, False)
    pack = partial(compressed, symmetric=False, straddle=straddle)
    matrices = write_foreign(tmp_path, section, pack, draw_with(3, 32, False, act_order=True))
    assert_equal(read_weights(tmp_path), matrices)


def test_plain_zero_points_and_one_scale(tmp_path: Path) -> None:
    """Zero points may also come as i8[N, G], already signed; a `tensor` scale is one number."""

    def pack(grid: Grid) -> dict[str, np.ndarray]:
        tensors = compressed(grid)
        return {**tensors, "weight_zero_point": (grid.zeros - 8).astype(np.int8)}

    section = _compressed_section(4, 32, False)
    matrices = write_foreign(tmp_path / "a", section, pack, draw_with(4, 32, False))
    assert_equal(read_weights(tmp_path / "a"), matrices)

    def draw(rows: int, columns: int, seed: int) -> Grid:
        grid = random_grid(rows, columns, 4, -1, True, False, seed)
        grid.scales[:] = np.float16(0.01)
        return grid

    def one(grid: Grid) -> dict[str, np.ndarray]:
        return {**compressed(grid), "weight_scale": grid.scales[0]}

    section = _compressed_section(4, -1, True, "tensor")
    matrices = write_foreign(tmp_path / "b", section, one, draw)
    assert_equal(read_weights(tmp_path / "b"), matrices)


def test_schemes_are_told_apart_by_shape(tmp_path: Path) -> None:
    """No target is matched: a regular expression of a stranger can run for ever."""

    def draw(rows: int, columns: int, seed: int) -> Grid:
        return random_grid(rows, columns, 8 if columns == 96 else 4, 32, True, False, seed)

    section = _compressed_section(4, 32, True)
    other = _compressed_section(8, 32, True)["config_groups"]["group_0"]
    section["config_groups"]["group_1"] = {**other, "targets": ["re:(a+)+$"]}
    matrices = write_foreign(tmp_path, section, compressed, draw)
    assert_equal(read_weights(tmp_path), matrices)


def test_the_sections_older_name(tmp_path: Path) -> None:
    section = _compressed_section(4, 32, True)
    matrices = write_foreign(tmp_path, {}, compressed, draw_with(4, 32, True))
    path = tmp_path / "config.json"
    edit_json(path, quantization_config=None, compression_config=section)
    assert_equal(read_weights(tmp_path), matrices)
