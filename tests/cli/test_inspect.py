"""`inspect`: what is printed of each format, by headers alone, and one line for what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_actor.load import shards
from engine_actor.load.tiny import write_tiny
from serve_app.cli import main
from tests.load.foreign import gptq, write_foreign
from tests.load.foreign_checks import draw_with
from tests.load.gguf_maker import write_gguf

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


@pytest.fixture
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(shards, "safe_open", forbidden)


@pytest.mark.usefixtures("no_weight_is_read")
def test_a_gptq_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 9 216 weights of q, k, v and o take 4 bits, 2 x 16 of a scale each and 2 x 4 of a
    zero point per 64, and 4 bytes of g_idx per column of each of the four.
    """
    write_foreign(tmp_path, GPTQ, gptq, draw_with(4, 32, False))
    assert main(["inspect", str(tmp_path), "--layers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["llama, 1 layers, 512 tokens of context", "format gptq"]
    qkv = next(line for line in lines if "qkv" in line)
    nbytes = 8192 // 2 + 128 * 2 * 2 + 128 * 2 // 2 + 3 * 64 * 4
    assert qkv.split()[:4] == ["layers.0.qkv", "W4", "group", "32"]
    assert f"{nbytes * 8 / 8192:.2f} bits per weight" in qkv


def test_a_gguf_file_and_its_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "format gguf Q4_1 Q8_0"
    assert lines[3].startswith("  1 x W8 group 32: ")
    assert lines[3].endswith(" 8.50 bits per weight")
    assert lines[4].startswith("  8 x W4 group 32: ")
    assert lines[4].endswith(" 5.00 bits per weight")


def test_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["family"], found["n_layers"]) == ("dense", "llama", 2)
    assert found["nbytes"] == 4 * found["weights"]
    assert found["layers"][0]["name"] == "embed"


def test_a_refusal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_foreign(tmp_path, {**GPTQ, "bits": 2}, gptq, draw_with(4, 32, False))
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "error: quantization_config.bits: 2 cannot be read (supported: 3, 4, 8)\n"
    )


def test_the_folder_itself_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "."]) == 1
    assert capsys.readouterr().err == (
        "error: .: not a checkpoint: config.json is not in the folder\n"
    )


def test_check_reads_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path, packed=True)
    assert main(["inspect", str(folder), "--check"]) == 0
    assert "self-check: nothing looks garbled" in capsys.readouterr().out
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    codes = {name: t for name, t in tensors.items() if name.endswith(".qweight")}
    save_file({**tensors, **{name: t | 0x77 for name, t in codes.items()}}, path)
    assert torch.equal(tensors["layers.0.o.qweight"], codes["layers.0.o.qweight"])
    assert main(["inspect", str(folder), "--check"]) == 1
    assert "zero points look one too low" in capsys.readouterr().err
