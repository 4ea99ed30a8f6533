"""What a user may write in model.path, and what each wrong thing says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine_actor.errors import CheckpointError
from engine_actor.load import source


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The Hub's snapshot_download, doubled: records its calls, touches no network."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_folder(tmp_path: Path) -> None:
    assert source.resolve(str(tmp_path), tmp_path / "cache") == tmp_path


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "prepare_demo", lambda cache, progress: cache / "prepared")
    assert source.resolve("demo", tmp_path) == tmp_path / "prepared"


def test_a_hub_id_fetches_only_data(tmp_path: Path, hub: list[dict[str, Any]]) -> None:
    found = source.resolve("Qwen/Qwen2.5-0.5B", tmp_path, revision="main")
    assert found == tmp_path / "snapshot"
    assert hub == [
        {
            "repo_id": "Qwen/Qwen2.5-0.5B",
            "revision": "main",
            "allow_patterns": ["*.safetensors", "*.json", "*.jinja"],
            "ignore_patterns": ["*/*", "consolidated*.safetensors"],
        }
    ]


def test_the_patterns_never_match_a_pickle_or_code() -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "chat_template.jinja",
        "pytorch_model.bin",
        "model.pt",
        "modeling.py",
        "onnx/model.safetensors",
        "consolidated.safetensors",
        "weights.gguf",
    ]
    kept = filter_repo_objects(files, allow_patterns=source.ALLOWED, ignore_patterns=source.IGNORED)
    assert list(kept) == files[:3]


@pytest.mark.parametrize(
    "path",
    ["", "nothing", "./a/b", "../a", "/no/such", "a/b/c", "org/..", "a--b/c", "org/na me", "-x/y"],
)
def test_neither_folder_nor_id(tmp_path: Path, path: str, hub: list[dict[str, Any]]) -> None:
    with pytest.raises(CheckpointError) as caught:
        source.resolve(path, tmp_path)
    assert str(caught.value) == (
        f"{path}: no such folder, and neither 'demo' nor a Hub id (org/name)"
    )
    assert hub == []


@pytest.mark.parametrize(
    ("path", "why"),
    [("a" * 300, "File name too long"), ("~no-such-user/x", "home directory")],
)
def test_what_the_system_cannot_look_up_is_one_line(tmp_path: Path, path: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"cannot be looked up \(.*{why}") as caught:
        source.resolve(path, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.touch()
    with pytest.raises(
        CheckpointError, match=r"is a file; give the folder of a checkpoint, or a \.gguf file$"
    ):
        source.resolve(str(file), tmp_path)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            LocalEntryNotFoundError("offline\nand more"),
            "a/b: no such folder here, the Hub cannot be reached and its cache does not have "
            "the model",
        ),
        (OSError("disk\nfull"), "a/b: the Hub refuses it (disk)"),
    ],
)
def test_hub_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        source.resolve("a/b", tmp_path)
    assert str(caught.value) == message
