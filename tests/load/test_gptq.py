"""GPTQ checkpoints of both zero conventions: every code, scale and zero point, bit for bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_actor.errors import CheckpointError
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.ops import DenseLinear, PackedLinear
from tests.load.foreign import (
    Grid,
    gptq,
    random_grid,
    write_foreign,
)
from tests.load.foreign_checks import WIDE, assert_equal, draw_with, read_weights
from tests.load.oracle import dequantise, edit_json


def _gptq_section(bits: int, group: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, **more}


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [-1, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq(tmp_path: Path, bits: int, group: int, symmetric: bool) -> None:
    """K = 576 and 96 in groups of 128 have short last groups. 3-bit codes straddle words."""
    section = _gptq_section(bits, group, symmetric, desc_act=False)
    matrices = write_foreign(tmp_path, section, gptq, draw_with(bits, group, symmetric), **WIDE)
    weights = read_weights(tmp_path)
    assert_equal(weights, matrices)
    for name in ("layers.0.qkv", "layers.0.gate_up"):
        layer = weights[name]
        assert isinstance(layer, PackedLinear)
        assert (layer.bits, layer.group, layer.perm) == (bits, group, None)
        assert (layer.zeros is None) == symmetric


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_both_zero_conventions_are_the_sameread_weights(tmp_path: Path, bits: int) -> None:
    """B-15. Zero point 0 is stored as all ones by version 1."""
    draw = draw_with(bits, 32, False)
    first = _gptq_section(bits, 32, False, checkpoint_format="gptq")
    second = _gptq_section(bits, 32, False, checkpoint_format="gptq_v2")
    one = write_foreign(tmp_path / "v1", first, gptq, draw)
    write_foreign(tmp_path / "v2", second, partial(gptq, stored_less=0), draw)
    assert_equal(read_weights(tmp_path / "v1"), one)
    assert_equal(read_weights(tmp_path / "v2"), one)


@pytest.mark.parametrize(("named", "stored_less"), [("gptq", 0), ("gptq_v2", 1)])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_the_wrong_zero_convention_is_refused(
    tmp_path: Path, named: str, stored_less: int, bits: int
) -> None:
    section = _gptq_section(bits, 32, True, checkpoint_format=named)
    pack = partial(gptq, stored_less=stored_less)
    write_foreign(tmp_path, section, pack, draw_with(bits, 32, True))
    middle = 1 << (bits - 1)
    reads, right = (middle + 1, "gptq_v2") if named == "gptq" else (middle - 1, "gptq")
    with pytest.raises(CheckpointError) as caught:
        read_weights(tmp_path)
    assert str(caught.value) == (
        "model.layers.0.self_attn.q_proj.qzeros: sym is true, but every zero point reads "
        f"{reads} instead of {middle}: checkpoint_format should be {right!r}"
    )


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_act_order_becomes_a_permutation(tmp_path: Path, bits: int) -> None:
    """q, k and v were drawn with orders of their own, so they stay three linears."""
    section = _gptq_section(bits, 32, False, desc_act=True)
    matrices = write_foreign(tmp_path, section, gptq, draw_with(bits, 32, False, True))
    weights = read_weights(tmp_path)
    assert_equal(weights, matrices)
    assert {"layers.0.q", "layers.0.k", "layers.0.v", "layers.0.gate", "layers.0.o"} <= set(weights)
    assert all(w.perm is not None for w in weights.values() if isinstance(w, PackedLinear))


def test_one_act_order_for_all_parts_is_fused(tmp_path: Path) -> None:
    """What AutoGPTQ writes: q, k and v see the same input, so they have the same order."""

    def draw(rows: int, columns: int, seed: int) -> Grid:
        grid = random_grid(rows, columns, 4, 32, False, False, seed)
        grid.g_idx = np.random.default_rng(columns).permutation(grid.g_idx)
        return grid

    section = _gptq_section(4, 32, False, desc_act=True)
    matrices = write_foreign(tmp_path, section, gptq, draw)
    weights = read_weights(tmp_path)
    assert_equal(weights, matrices)
    assert {"layers.0.qkv", "layers.0.gate_up"} <= set(weights)


def test_uneven_groups_are_refused(tmp_path: Path) -> None:
    def draw(rows: int, columns: int, seed: int) -> Grid:
        grid = random_grid(rows, columns, 4, 32, False, False, seed)
        grid.g_idx[0] = 1
        return grid

    write_foreign(tmp_path, _gptq_section(4, 32, False), gptq, draw)
    with pytest.raises(CheckpointError, match=r"g_idx: its groups do not have 32 columns each"):
        read_weights(tmp_path)


def test_bits_of_each_layer_by_its_shapes(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: down has 8 bits, everything else 4."""

    def draw(rows: int, columns: int, seed: int) -> Grid:
        return random_grid(rows, columns, 8 if columns == 96 else 4, 32, False, False, seed)

    section = _gptq_section(4, 32, False, dynamic={"+:.*down.*": {"bits": 8}})
    matrices = write_foreign(tmp_path, section, gptq, draw)
    assert_equal(read_weights(tmp_path), matrices)
    assert open_checkpoint(tmp_path).quantisation.kinds == ((4, 32, 3), (0, 0, 2), (8, 32, 1))


def test_settings_of_older_repositories(tmp_path: Path) -> None:
    matrices = write_foreign(tmp_path, {}, gptq, draw_with(4, 32, True))
    edit_json(tmp_path / "config.json", quantization_config=None)
    older = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (tmp_path / "quantize_config.json").write_text(json.dumps(older))
    assert_equal(read_weights(tmp_path), matrices)


def test_a_bias_of_zeros_is_dropped_and_another_refused(tmp_path: Path) -> None:
    write_foreign(tmp_path, _gptq_section(4, 32, True), gptq, draw_with(4, 32, True))
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj.bias"
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    save_file({**tensors, name: torch.zeros(64)}, path)
    down = read_weights(tmp_path)["layers.0.down"]
    assert isinstance(down, PackedLinear)
    assert down.bias is None
    save_file({**tensors, name: torch.ones(64)}, path)
    with pytest.raises(CheckpointError, match=r"down_proj\.bias: is not zero"):
        read_weights(tmp_path)


def test_biases_of_qwen2_are_fused(tmp_path: Path) -> None:
    section = _gptq_section(4, 32, True)
    matrices = write_foreign(tmp_path, section, gptq, draw_with(4, 32, True), family="qwen2")
    weights = read_weights(tmp_path)
    assert_equal(weights, matrices)
    stored = load_file(tmp_path / "model.safetensors")
    qkv = weights["layers.0.qkv"]
    assert isinstance(qkv, PackedLinear)
    parts = [stored[f"model.layers.0.self_attn.{p}_proj.bias"] for p in "qkv"]
    assert qkv.bias is not None
    assert torch.equal(qkv.bias, torch.cat(parts))


@pytest.mark.parametrize(("scale", "packs"), [(2.0**-9, True), (2.0**-24 * 1.5, False)])
def test_scales_of_another_dtype_stay_exact(tmp_path: Path, scale: float, packs: bool) -> None:
    """A bf16 scale that is no fp16 number makes that linear a dense fp32 matrix."""
    draw = draw_with(4, 32, True)
    matrices = write_foreign(tmp_path, _gptq_section(4, 32, True), gptq, draw)
    path = tmp_path / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    name = "model.layers.0.mlp.down_proj"
    before = tensors[f"{name}.scales"]
    tensors[f"{name}.scales"] = torch.full_like(before, scale, dtype=torch.bfloat16)
    save_file(tensors, path)
    down = read_weights(tmp_path)["layers.0.down"]
    ratio = scale / before.T.float().repeat_interleave(32, 1).numpy()
    expected = np.rint(matrices[name] * ratio / scale) * np.float32(scale)
    if packs:
        assert isinstance(down, PackedLinear)
        assert np.array_equal(dequantise(down), expected)
    else:
        assert isinstance(down, DenseLinear)
        assert down.weight.dtype == torch.float32
        assert np.array_equal(down.weight.numpy(), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    write_foreign(tmp_path, _gptq_section(4, 32, True), gptq, draw_with(4, 32, True))
    path = tmp_path / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    tensors["model.layers.0.mlp.up_proj.scales"][1, 3] = value
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"up_proj: has a scale that is not finite$"):
        read_weights(tmp_path)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_group_longer_than_any_row_is_the_row(tmp_path: Path, bits: int) -> None:
    """What a config merely claims takes no memory: one scale a row, whatever the number."""
    section = _gptq_section(bits, 2**24, True, desc_act=False)
    matrices = write_foreign(tmp_path, section, gptq, draw_with(bits, -1, True), **WIDE)
    weights = read_weights(tmp_path)
    assert_equal(weights, matrices)
    layer = weights["layers.0.qkv"]
    assert isinstance(layer, PackedLinear)
    assert layer.group_size == layer.in_features
