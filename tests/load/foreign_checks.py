"""What the tests of all foreign formats share: draw, load, compare every matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.formats.base import Weight
from engine_actor.load.names import hub_name
from engine_actor.ops import PackedLinear
from tests.load.foreign import (
    Grid,
    random_grid,
)
from tests.load.oracle import dequantise

WIDE = {"hidden_size": 576, "head_dim": 16, "num_attention_heads": 8}
"""K = 576: four whole groups of 128 and a short one."""
PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def draw_with(bits: int, group: int, symmetric: bool, act_order: bool = False) -> Any:
    """The `draw` of write_foreign with these settings."""

    def draw(rows: int, columns: int, seed: int) -> Grid:
        return random_grid(rows, columns, bits, group, symmetric, act_order, seed)

    return draw


def read_weights(folder: Path) -> dict[str, Weight]:
    """Everything the checkpoint yields."""
    return dict(open_checkpoint(folder).weights())


def assert_equal(weights: dict[str, Weight], matrices: dict[str, np.ndarray]) -> None:
    """All seven linears are packed, and dequantised they are these matrices."""
    seen = 0
    for name, weight in weights.items():
        if not name.startswith("layers.") or name.endswith("norm"):
            continue
        leaf = name.rsplit(".", 1)[1]
        parts = [hub_name(f"layers.0.{part}") for part in PARTS.get(leaf, (leaf,))]
        expected = np.concatenate([matrices[part] for part in parts])
        assert isinstance(weight, PackedLinear), name
        assert weight.scales.dtype == torch.float16
        assert np.array_equal(dequantise(weight), expected), name
        seen += len(parts)
    assert seen == len(matrices) == 7
