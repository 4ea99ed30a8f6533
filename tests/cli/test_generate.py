"""`deepinfer-sm86 generate`: the whole path in one process, from a checkpoint folder to text."""

from __future__ import annotations

import json

import pytest

from engine_actor.load.tiny import write_tiny
from serve_app.cli import main


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A tiny checkpoint, named by its folder; nothing is written outside tmp_path."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    write_tiny(folder)
    return str(folder)


def _generate(capsys, *flags: str) -> str:
    assert main(["generate", *flags, "--cpu-threads", "1", "--kv-budget-mb", "16"]) == 0
    return capsys.readouterr().out


def test_the_same_seed_prints_the_same_text(tiny, capsys):
    flags = ["--model", tiny, "Hello", "--max-tokens", "12", "--temperature", "1", "--seed", "3"]
    first = _generate(capsys, *flags)
    assert first == _generate(capsys, *flags)
    assert len(first) > 1
    assert first.endswith("\n")


def test_a_stop_string_ends_the_text_before_it(tiny, capsys):
    whole = _generate(capsys, "--model", tiny, "Hello", "--max-tokens", "12").rstrip("\n")
    stop = whole[len(whole) // 2 :][:2]
    cut = _generate(capsys, "--model", tiny, "Hello", "--max-tokens", "12", "--stop", stop)
    assert cut.rstrip("\n") == whole[: whole.index(stop)]


def test_what_the_engine_refuses_is_one_line(tiny, capsys):
    assert main(["generate", "--model", tiny, "Hello", "--max-tokens", "1000000"]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: ")


def test_what_is_no_checkpoint_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    assert main(["generate", "--model", str(tmp_path), "Hello"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert "Unknown" in error
