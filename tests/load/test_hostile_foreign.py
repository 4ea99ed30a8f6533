"""Quantised checkpoints of other programs that lie: opened or refused in one line, nothing else.

The fuzzers change one thing in a file that is whole; whatever that gives, no other exception.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine_actor.errors import CheckpointError
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import write_tiny
from tests.load.foreign import awq, compressed, gptq, write_foreign
from tests.load.foreign_checks import draw_with
from tests.load.gguf_maker import write_gguf
from tests.load.oracle import edit_json

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": False,
    "strategy": "group",
    "group_size": 32,
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
FORMATS = {
    "gptq": (GPTQ, gptq, True),
    "awq": (AWQ, awq, False),
    "compressed": (COMPRESSED, partial(compressed, symmetric=False), True),
}


def _write(folder: Path, name: str) -> Path:
    section, pack, act_order = FORMATS[name]
    write_foreign(folder, section, pack, draw_with(4, 32, False, act_order))
    return folder


def _message(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        dict(open_checkpoint(folder).weights())
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"bits": 2}, "bits: 2 cannot be read (supported: 3, 4, 8)"),
        ("gptq", {"bits": True}, "bits: True cannot be read"),
        ("gptq", {"group_size": 0}, "group_size: 0 must be -1 or at least 1"),
        (
            "gptq",
            {"group_size": 2**40},
            "group_size: 1099511627776 must be -1 or at least 1, at most",
        ),
        (
            "awq",
            {"group_size": 2**40},
            "group_size: 1099511627776 must be -1 or at least 1, at most",
        ),
        ("gptq", {"group_size": 2**80}, "group_size: a huge number must be -1 or at least 1"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' cannot be read"),
        ("gptq", {"checkpoint_format": "gptq_p"}, "checkpoint_format: 'gptq_p' cannot be read"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format: True cannot be read"),
        ("gptq", {"pack_dtype": "int8"}, "pack_dtype: 'int8' cannot be read"),
        ("gptq", {"rotation": "hadamard"}, "rotation: 'hadamard' cannot be read"),
        ("gptq", {"bits": 8}, None),
        ("awq", {"version": "gemv"}, "version: 'gemv' cannot be read (supported: 'gemm')"),
        ("awq", {"bits": 3}, "bits: 3 cannot be read (AWQ has 4)"),
        ("compressed", {"format": "marlin-24"}, "format: 'marlin-24' cannot be read"),
        ("compressed", {"config_groups": {}}, "config_groups: is missing or empty"),
        ("compressed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: cannot be honoured"),
        ("compressed", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config: cannot be"),
        (
            "compressed",
            {"config_groups": {"a": {"weights": WEIGHTS, "input_activations": {}}}},
            "config_groups.a.input_activations: quantised activations cannot be honoured",
        ),
        (
            "compressed",
            {"config_groups": {"a": {"weights": {**WEIGHTS, "type": "float"}}}},
            "config_groups.a.weights: 4 bits of type 'float' cannot be read",
        ),
    ],
)
def test_settings_we_cannot_honour(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str | None
) -> None:
    """None: the settings are fine in themselves, the shapes are not theirs."""
    section = {**FORMATS[name][0], **changes}
    edit_json(_write(tmp_path, name) / "config.json", quantization_config=section)
    found = _message(tmp_path)
    if message is None:
        assert "shape is [" in found
    else:
        assert found.startswith(f"quantization_config.{message}")


O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "value", "message"),
    [
        ("gptq", "g_idx", torch.full((64,), -1, dtype=torch.int32), "names group -1 of 2"),
        (
            "gptq",
            "g_idx",
            torch.full((64,), 2**31 - 1, dtype=torch.int32),
            "names group 2147483647",
        ),
        ("gptq", "qweight", torch.zeros(8, 63, dtype=torch.int32), "shape is [8, 63], must be"),
        ("gptq", "qweight", torch.zeros(8, 64), "dtype is F32, must be I32"),
        ("gptq", "scales", torch.zeros(3, 64), "shape is [3, 64], must be [2, 64]"),
        ("gptq", "other", torch.zeros(3), "unexpected tensor"),
        ("awq", "qzeros", torch.zeros(2, 9, dtype=torch.int32), "shape is [2, 9], must be [2, 8]"),
        ("awq", "scales", torch.full((2, 64), float("nan")), "has a scale that is not finite"),
        ("compressed", "weight_packed", torch.zeros(64, 7, dtype=torch.int32), "fit no scheme"),
        ("compressed", "weight_shape", torch.tensor([64, 63]), "is [64, 63], must be [64, 64]"),
        ("compressed", "weight_g_idx", torch.full((64,), 9), "names group 9 of 2"),
        ("compressed", "weight_scale", torch.zeros(64, 2, 1), "fit no scheme"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, name: str, tensor: str, value: torch.Tensor, message: str
) -> None:
    path = _write(tmp_path, name) / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    save_file({**tensors, f"{O_PROJ}.{tensor}": value}, path)
    found = _message(tmp_path)
    assert found.startswith(O_PROJ)
    assert message in found


def test_a_perm_that_reads_outside_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, packed=True)
    path = folder / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    save_file({**tensors, "layers.0.o.perm": torch.arange(1, 65, dtype=torch.int32)}, path)
    assert _message(folder) == "layers.0.o: its perm is no permutation of the columns"


def test_a_nan_in_a_dense_weight_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path) / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(tensors, path)
    assert _message(tmp_path) == "layers.1.down: has a value that is not finite"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: _write(tmp_path_factory.mktemp(name), name) for name in FORMATS}


def _loads_or_refuses(path: Path) -> None:
    message = ""
    try:
        for _ in open_checkpoint(path).weights():
            pass
    except CheckpointError as error:
        message = str(error)
    assert message.isprintable()


FUZZ = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.mark.parametrize("name", FORMATS)
@FUZZ
@given(data=st.data())
def test_any_value_of_any_setting_loads_or_is_refused(
    whole: dict[str, Path], name: str, data: st.DataObject
) -> None:
    path = whole[name] / "config.json"
    before = path.read_text()
    config = json.loads(before)
    place = data.draw(st.sampled_from([config, config["quantization_config"]]))
    if name == "compressed" and data.draw(st.booleans()):
        place = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    key = data.draw(st.sampled_from(sorted(place)))
    # Many layers are no attack: the first one that is missing ends it. A long wait is none either.
    place[key] = data.draw(VALUES)
    try:
        path.write_text(json.dumps(config))
        _loads_or_refuses(whole[name])
    finally:
        path.write_text(before)


@pytest.mark.parametrize("name", FORMATS)
@FUZZ
@given(data=st.data())
def test_any_changed_byte_loads_or_is_refused(
    whole: dict[str, Path], name: str, data: st.DataObject
) -> None:
    """Half of them within the header."""
    path = whole[name] / "model.safetensors"
    before = path.read_bytes()
    header = 8 + int.from_bytes(before[:8], "little")
    end = data.draw(st.sampled_from([header, len(before)]))
    at, value = data.draw(st.integers(0, end - 1)), data.draw(st.integers(0, 255))
    try:
        path.write_bytes(before[:at] + bytes([value]) + before[at + 1 :])
        _loads_or_refuses(whole[name])
    finally:
        path.write_bytes(before)


@FUZZ
@given(data=st.data())
def test_any_changed_byte_of_a_gguf_model_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Within the metadata, where it can hurt."""
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    write_gguf(path, "qwen2", pre="qwen2")
    before = path.read_bytes()
    end = before.index(b"blk.0.attn_q.weight") + 500
    at, value = data.draw(st.integers(0, end)), data.draw(st.integers(0, 255))
    path.write_bytes(before[:at] + bytes([value]) + before[at + 1 :])
    _loads_or_refuses(path)
