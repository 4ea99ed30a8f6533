"""Folders that are no checkpoint, or not whole: one line that names the file, key or tensor."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_actor.errors import CheckpointError
from engine_actor.load import checkpoint, shards
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import write_tiny
from tests.load.oracle import edit_json

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def _message(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a tensor fails the test: refusals come from headers alone."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(shards, "safe_open", forbidden)


@pytest.fixture
def dense(tmp_path: Path, no_weight_is_read: None) -> Path:
    return write_tiny(tmp_path / "tiny")


@pytest.fixture
def packed(tmp_path: Path, no_weight_is_read: None) -> Path:
    return write_tiny(tmp_path / "tiny", packed=True)


def test_not_a_folder(tmp_path: Path) -> None:
    assert _message(tmp_path / "none") == f"{tmp_path}/none: not a folder"


def test_an_empty_folder(tmp_path: Path) -> None:
    assert _message(tmp_path).endswith("not a checkpoint: config.json is not in the folder")


def test_a_folder_without_weights(dense: Path) -> None:
    (dense / "model.safetensors").unlink()
    assert _message(dense) == (
        "tiny: not a checkpoint: neither model.safetensors nor model.safetensors.index.json "
        "is in the folder"
    )


class _Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_and_never_run(dense: Path, name: str) -> None:
    (dense / "model.safetensors").unlink()
    (dense / name).write_bytes(pickle.dumps(_Bomb()))
    assert _message(dense) == (
        f"tiny: has only pickled weights ({name}), which can run code and are never loaded: "
        "convert them to safetensors"
    )


def test_a_broken_gguf_file_alone(dense: Path) -> None:
    (dense / "model.safetensors").rename(dense / "model.gguf")
    assert _message(dense) == "model.gguf: not a GGUF file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not JSON (Expecting property name"),
        ("[]", "config.json: must hold a JSON object, not list"),
        ("[" * 100_000, "config.json: not JSON (nested too deeply)"),
        ("\x80", "config.json: not JSON"),
    ],
)
def test_a_config_that_is_no_object(dense: Path, text: str, message: str) -> None:
    (dense / "config.json").write_bytes(text.encode("latin-1"))
    assert _message(dense).startswith(message)


def test_a_missing_tensor(dense: Path) -> None:
    _edit(dense, lambda tensors: tensors.pop(Q_PROJ))
    assert _message(dense) == f"{Q_PROJ}: missing tensor"


def test_an_unexpected_tensor(dense: Path) -> None:
    """A bias that the family does not use would be silently dropped: wrong text, no error."""
    name = Q_PROJ.replace("weight", "bias")
    _edit(dense, lambda tensors: tensors.update({name: torch.zeros(64)}))
    assert _message(dense) == f"{name}: unexpected tensor: this model family does not use it"


def test_a_misshapen_tensor(dense: Path) -> None:
    _edit(dense, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 63)}))
    assert _message(dense) == f"{Q_PROJ}: shape is [64, 63], must be [64, 64]"


def test_a_wrong_dtype(dense: Path) -> None:
    _edit(dense, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    assert _message(dense) == f"{Q_PROJ}: dtype is I8, must be F32 or F16 or BF16"


def test_a_truncated_file(dense: Path) -> None:
    path = dense / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    message = _message(dense)
    assert message.startswith("model.safetensors: truncated: tensor ")


def test_more_layers_than_tensors_ends_at_the_first_missing_one(dense: Path) -> None:
    edit_json(dense / "config.json", num_hidden_layers=10**9)
    assert "model.layers.2.input_layernorm.weight: missing tensor" in _message(dense) or (
        "num_hidden_layers" in _message(dense)
    )


def test_a_shard_that_is_not_there(tmp_path: Path, no_weight_is_read: None) -> None:
    folder = write_tiny(tmp_path / "tiny", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert _message(folder) == (
        "model.safetensors.index.json: names the shard model-00002-of-00002.safetensors, "
        "which is not in the folder"
    )


def test_a_tensor_that_its_shard_does_not_have(tmp_path: Path, no_weight_is_read: None) -> None:
    folder = write_tiny(tmp_path / "tiny", shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    assert _message(folder) == (
        "model.safetensors.index.json: tensor model.extra.weight is not in the shard "
        "model-00001-of-00002.safetensors"
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: 'bitsandbytes' cannot be read"),
        ("gptq", "quant_method: None cannot be read"),
        ({"quant_method": "deepinfer"}, "format_version: is None, this release reads 1"),
        ({"quant_method": "deepinfer", "format_version": 2}, "format_version: is 2, this release"),
        (
            {"quant_method": "deepinfer", "format_version": 1, "rotate": True, "linears": {}},
            "rotate: unknown key",
        ),
        (
            {"quant_method": "deepinfer", "format_version": 1},
            "linears: must map each packed linear to its bits and group",
        ),
        (
            {"quant_method": "deepinfer", "format_version": 1, "linears": {"embed": {"bits": 4}}},
            "linears.embed: must have exactly bits and group",
        ),
        (
            {
                "quant_method": "deepinfer",
                "format_version": 1,
                "linears": {"embed": {"bits": 5, "group": 32}},
            },
            "linears.embed: bits 5 must be one of 3, 4, 8",
        ),
        (
            {
                "quant_method": "deepinfer",
                "format_version": 1,
                "linears": {"embed": {"bits": 8, "group": 0}},
            },
            "linears.embed.group: 0 must be -1 or at least 1",
        ),
        (
            {"quant_method": "deepinfer", "format_version": 1, "linears": {}},
            "linears: does not name embed, whose tensors are packed",
        ),
    ],
)
def test_a_wrong_quantisation_section(packed: Path, section: Any, message: str) -> None:
    edit_json(packed / "config.json", quantization_config=section)
    assert _message(packed).startswith(f"quantization_config.{message}")


def test_a_packed_linear_that_the_model_does_not_have(packed: Path) -> None:
    section = json.loads((packed / "config.json").read_text())["quantization_config"]
    section["linears"]["layers.9.qkv"] = {"bits": 4, "group": 32}
    edit_json(packed / "config.json", quantization_config=section)
    assert _message(packed) == (
        "quantization_config.linears: names layers.9.qkv, which the model does not have"
    )


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("layers.0.o.qweight", torch.zeros(64, 33, dtype=torch.uint8), "shape is [64, 33], must"),
        ("layers.0.o.qweight", torch.zeros(64, 32, dtype=torch.int8), "dtype is I8, must be U8"),
        ("layers.0.o.scales", torch.zeros(64, 2), "dtype is F32, must be F16"),
        ("layers.0.o.scales", torch.zeros(64, 3, dtype=torch.float16), "shape is [64, 3], must"),
        ("layers.0.o.offsets", torch.zeros(64, 1, dtype=torch.float16), "shape is [64, 1], must"),
        ("layers.0.o.zeros", torch.zeros(64, 2), "dtype is F32, must be I8"),
        ("layers.0.o.perm", torch.zeros(63, dtype=torch.int32), "shape is [63], must be [64]"),
        ("layers.0.o.bias", torch.zeros(64), "unexpected tensor"),
        ("layers.0.o.other", torch.zeros(1), "unexpected tensor"),
    ],
)
def test_a_misshapen_packed_tensor(
    packed: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    _edit(packed, lambda tensors: tensors.update({name: tensor}))
    assert _message(packed).startswith(f"{name}: {message}")


def test_offsets_and_zeros_together(packed: Path) -> None:
    extra = {
        "layers.0.o.offsets": torch.zeros(64, 2, dtype=torch.float16),
        "layers.0.o.zeros": torch.zeros(64, 2, dtype=torch.int8),
    }
    _edit(packed, lambda tensors: tensors.update(extra))
    assert _message(packed).startswith("layers.0.o: has both offsets and zeros")


def test_a_missing_packed_tensor(packed: Path) -> None:
    _edit(packed, lambda tensors: tensors.pop("layers.1.down.scales"))
    assert _message(packed) == "layers.1.down.scales: missing tensor"


@pytest.mark.parametrize(
    "text", ["{}", '{"model": {"vocab": 5}, "added_tokens": 7}', '{"added_tokens": {"id": 3}}']
)
def test_a_tokenizer_without_vocabulary(dense: Path, text: str) -> None:
    (dense / checkpoint.TOKENIZER).write_text(text)
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: has no vocabulary$"):
        open_checkpoint(dense).usable_vocab_size()
