"""Safetensors files that are damaged or made to hurt: one line each, before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_actor.errors import CheckpointError
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.shards import ShardSet, read_header
from tests.load.oracle import safetensors_bytes


def _entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _refused(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix("model.safetensors: ")


DATA = bytes(16)
HEADERS = [
    ("[]", "must hold a JSON object, not list"),
    ('{"a": ', "not JSON (Expecting value: line 1 column 7 (char 6))"),
    ("[" * 100_000, "not JSON (nested too deeply)"),
    ('{"a": 1, "a": 2}', "key 'a' comes twice"),
    ({"a": 7}, "tensor a: its entry is not an object"),
    ({"a": _entry([4], 0, 16, "F32\n")}, "tensor a: unknown dtype 'F32\\n'"),
    ({"a": _entry([-4], 0, 16)}, "tensor a: shape [-4] is not a list of sizes"),
    ({"a": _entry([4.0], 0, 16)}, "tensor a: shape [4.0] is not a list of sizes"),  # type: ignore[list-item]
    ({"a": _entry([True], 0, 4)}, "tensor a: shape [True] is not a list of sizes"),
    ({"a": _entry([4], 16, 0)}, "tensor a: data_offsets [16, 0] are not a span"),
    ({"a": _entry([2**62, 2**62], 0, 16)}, f"tensor a: 16 bytes, but F32 {[2**62] * 2} takes"),
    ({"a": _entry([4], 0, 12)}, "tensor a: 12 bytes, but F32 [4] takes 16"),
    (
        {"a": _entry([2], 0, 8), "b": _entry([2], 4, 12)},
        "tensor b overlaps the tensor before it (starts at 4, not 8)",
    ),
    (
        {"a": _entry([1], 0, 4), "b": _entry([2], 8, 16)},
        "tensor b leaves a gap before it (starts at 8, not 4)",
    ),
    ({"a": _entry([2], 0, 8)}, "8 bytes after the last tensor"),
    ({"a": _entry([8], 0, 32)}, "truncated: tensor a ends at byte 32, 16 are there"),
    ({"a\nb": _entry([8], 0, 32)}, "truncated: tensor a\\nb ends at byte 32, 16 are there"),
]


@pytest.mark.parametrize(("header", "message"), HEADERS)
def test_a_wrong_header_is_one_line(tmp_path: Path, header: Any, message: str) -> None:
    assert _refused(tmp_path, safetensors_bytes(header, DATA)).startswith(message)


def test_a_header_longer_than_the_file_is_not_allocated(tmp_path: Path) -> None:
    content = (2**40).to_bytes(8, "little") + b"{}"
    assert _refused(tmp_path, content) == "header of 1099511627776 bytes is over 16777216"
    content = (1000).to_bytes(8, "little") + b"{}"
    assert _refused(tmp_path, content) == "truncated: header of 1000 bytes, 2 are there"


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_a_header(tmp_path: Path, size: int) -> None:
    message = _refused(tmp_path, bytes(size))
    assert message == f"truncated: {size} bytes are no safetensors file"


def test_a_long_name_does_not_flood_the_log(tmp_path: Path) -> None:
    header = {"x" * 100_000: _entry([8], 0, 32)}
    assert len(_refused(tmp_path, safetensors_bytes(header, DATA))) <= 400


@pytest.mark.parametrize(
    "file",
    [
        "../evil.safetensors",
        "/etc/evil.safetensors",
        "sub/evil.safetensors",
        "..\\evil.safetensors",
        "weights.bin",
        "..",
        "",
        7,
    ],
)
def test_the_index_cannot_lead_out_of_the_folder(tmp_path: Path, file: Any) -> None:
    import json

    index = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        ShardSet.open(tmp_path)
    assert str(caught.value) == (
        f"model.safetensors.index.json: tensor model.norm.weight: shard {file!r} "
        "is not a plain .safetensors file name"
    )


def _two_shards(folder: Path, second: dict[str, Any]) -> None:
    import json

    for number, header in enumerate([{"a": _entry([4], 0, 16)}, second]):
        (folder / f"{number}.safetensors").write_bytes(safetensors_bytes(header, DATA))
    weight_map = {"a": "0.safetensors", "b": "1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    _two_shards(tmp_path, {"b": _entry([2], 0, 8), "a": _entry([2], 8, 16)})
    with pytest.raises(CheckpointError) as caught:
        ShardSet.open(tmp_path)
    assert str(caught.value) == (
        "1.safetensors: holds tensor a too, which the index has in 0.safetensors"
    )


def test_a_tensor_the_index_does_not_know_is_not_there(tmp_path: Path) -> None:
    _two_shards(tmp_path, {"b": _entry([2], 0, 8), "c": _entry([2], 8, 16)})
    assert sorted(ShardSet.open(tmp_path).tensors) == ["a", "b"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(safetensors_bytes({"a": _entry([4], 0, 16)}, DATA))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).symlink_to("../secret")
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        ShardSet.open(folder) if "safe" in name else open_checkpoint(folder)
    assert str(caught.value) == (
        f"{name}: is a link that leads out of its folder; put the file itself there"
    )


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0f", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "77").write_bytes(safetensors_bytes({"a": _entry([4], 0, 16)}, DATA))
    (snapshot / "model.safetensors").symlink_to("../../blobs/77")
    assert sorted(ShardSet.open(snapshot).tensors) == ["a"]
    linked = tmp_path / "elsewhere"
    linked.symlink_to(snapshot)
    assert sorted(ShardSet.open(linked).tensors) == ["a"]


def test_a_pipe_is_no_file_to_wait_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        ShardSet.open(tmp_path)
