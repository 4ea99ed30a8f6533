"""Our reader against compressed-tensors itself: it quantises and packs, it says what that means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.ops import PackedLinear
from tests.load.foreign import Grid, random_grid, write_foreign
from tests.load.oracle import dequantise


def _scheme(bits: int, group: int, symmetric: bool) -> QuantizationScheme:
    weights = QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="channel" if group == -1 else "group",
        group_size=None if group == -1 else group,
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_library_and_we_read_the_same(
    tmp_path: Path, bits: int, group: int, symmetric: bool
) -> None:
    scheme = _scheme(bits, group, symmetric)
    theirs: list[np.ndarray] = []

    def draw(rows: int, columns: int, seed: int) -> Grid:
        grid = random_grid(rows, columns, bits, group, symmetric, False, seed)
        grid.scales = np.abs(grid.scales)  # the library divides by them
        return grid

    def pack(grid: Grid) -> dict[str, np.ndarray]:
        middle = 1 << (bits - 1)
        packed = PackedQuantizationCompressor.compress(
            {
                "weight": torch.from_numpy(grid.matrix()),
                "weight_scale": torch.from_numpy(grid.scales.astype(np.float32)),
                "weight_zero_point": torch.from_numpy((grid.zeros - middle).astype(np.int8)),
            },
            scheme,
        )
        theirs.append(PackedQuantizationCompressor.decompress(packed, scheme)["weight"].numpy())
        return {name: tensor.numpy() for name, tensor in packed.items()}

    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    matrices = write_foreign(tmp_path, section, pack, draw)
    weights = dict(open_checkpoint(tmp_path).weights())
    for their, name in zip(theirs, matrices, strict=True):
        assert np.array_equal(their, matrices[name])
    for ours, names in {
        "layers.0.down": ["mlp.down_proj"],
        "layers.0.o": ["self_attn.o_proj"],
        "layers.0.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "layers.0.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
    }.items():
        layer = weights[ours]
        assert isinstance(layer, PackedLinear)
        order = list(matrices)
        expected = [theirs[order.index(f"model.layers.0.{name}")] for name in names]
        assert np.array_equal(dequantise(layer), np.concatenate(expected)), ours
