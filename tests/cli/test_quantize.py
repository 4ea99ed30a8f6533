"""`deepinfer-sm86 quantize` and `eval` as a user types them, and what they say to mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import write_tiny
from engine_actor.quant.plan import engine_bytes, make_plan
from engine_actor.quant.recipe import fixed_recipe
from engine_actor.quant.texts import token_rows
from serve_app.cli import main

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the sun. " * 80


@pytest.fixture
def source(tmp_path) -> Path:
    """A tiny checkpoint and a text of some rows beside it."""
    (tmp_path / "text.txt").write_text(TEXT)
    return write_tiny(tmp_path / "source", "qwen2", head_std=0.05)


def run(*words: object) -> int:
    """The command with small texts and one thread."""
    return main([*map(str, words), "--threads", "1", "--device", "cpu"])


def convert(source: Path, name: str, *words: object) -> int:
    """quantize into a neighbour."""
    text = source.parent / "text.txt"
    target = source.parent / name
    return run("quantize", source, target, "--text", text, "--calibration", text, *words)


def test_quantize_prints_a_plan_then_a_report_and_eval_agrees(source, capsys):
    assert convert(source, "out", "--recipe", "mixed", "--group", 32) == 0
    out = capsys.readouterr().out
    assert out.index("layers (mixed, ") < out.index("KV cache, at least") < out.index("is ready")
    section = json.loads((source.parent / "out/config.json").read_text())["quantization_config"]
    report = section["source"]["report"]
    text = source.parent / "text.txt"
    assert run("eval", source.parent / "out", "--source", source, "--text", text, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kl"] == pytest.approx(report["kl"], abs=2e-6)
    assert found["perplexity"] == pytest.approx(report["perplexity"], rel=1e-5)
    assert run("eval", source.parent / "out", "--text", text) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(str(source.parent / "out") + " (packed: 4 x W4 group 32, 4 x W3")
    assert f"perplexity {found['perplexity']:.3f} over" in lines[1]


def test_auto_fits_what_it_was_told_to_fit(source, capsys):
    beside = engine_bytes(open_checkpoint(source).config)
    budget = beside + (550 << 10)
    assert convert(source, "out", "--recipe", "auto", "--fit", f"{budget}") == 0
    out = capsys.readouterr().out
    made = open_checkpoint(source.parent / "out")
    cache = 2 * 2 * 2 * 16 * 2 * 512
    assert made.nbytes + cache + beside <= budget
    assert "budget" in out


def test_a_budget_that_8_bits_exceed_gives_the_embedding_4(source, capsys):
    budget = make_plan(open_checkpoint(source).config, fixed_recipe("w3", 32)).total - 100
    flags = ("--recipe", "w3", "--group", 32, "--fit", budget)
    assert convert(source, "out", *flags) == 0
    weights = dict(open_checkpoint(source.parent / "out").weights())
    assert (weights["embed"].bits, weights["head"].bits) == (4, 8)
    assert convert(source, "other", *flags, "--embedding-bits", 8) == 1
    assert "the budget is" in capsys.readouterr().err


@pytest.mark.parametrize("head", [8, 4])
def test_four_bits_for_the_embedding_and_for_the_head_apart(source, head):
    flags = ("--embedding-bits", 4, "--head-bits", head, "--offsets")
    assert convert(source, "out", *flags) == 0
    weights = dict(open_checkpoint(source.parent / "out").weights())
    assert (weights["embed"].bits, weights["head"].bits) == (4, head)
    assert weights["layers.0.o"].offsets is not None


MISTAKES = [
    (("--fit", "four"), "--fit four: not a size"),
    (("--fit", "90KiB"), "the smallest recipe"),
    (("--group", "0"), "--group 0: must be at least 1"),
    (("--recipe", "auto", "--group", "64"), "chooses groups itself"),
    (("--recipe", "auto", "--fit", "90KiB"), "the smallest recipe"),
    (("--calibration", "/nowhere/text"), "/nowhere/text: cannot be read"),
    (("--group", "48"), "--group 48: no GPU kernel for layers.0.qkv: group 48 is none of (32, 64,"),
]


@pytest.mark.parametrize(("words", "reason"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line_and_leaves_nothing(source, capsys, words, reason):
    before = {path.name for path in source.parent.iterdir()}
    assert convert(source, "out", *words) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert reason in error
    assert {path.name for path in source.parent.iterdir()} == before


def test_a_folder_that_is_there_is_not_overwritten(source, capsys):
    (source.parent / "out").mkdir()
    assert convert(source, "out") == 1
    assert "is there already; nothing is overwritten" in capsys.readouterr().err
    (source.parent / "link").symlink_to(source.parent / "nowhere")
    assert convert(source, "link") == 1
    assert "is there already; nothing is overwritten" in capsys.readouterr().err


def test_a_group_longer_than_every_row_is_the_row(source):
    """It had been work and memory by that number."""
    assert convert(source, "out", "--group", str(2**24)) == 0
    assert convert(source, "rows", "--group", "192") == 0
    for name in ("out", "rows"):
        assert main(["inspect", str(source.parent / name)]) == 0
    one, other = (load_file(source.parent / name / "model.safetensors") for name in ("out", "rows"))
    assert {name for name in one if not torch.equal(one[name], other[name])} == set()


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"\xff" * 200, b"{}" * 50])
def test_what_is_no_checkpoint_is_refused_in_one_line(source, capsys, content):
    (source / "model.safetensors").write_bytes(content)
    assert convert(source, "out") == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "model.safetensors" in errors[0]


def test_a_source_with_another_tokenizer_gives_no_divergence(source, capsys):
    other = write_tiny(source.parent / "other", "qwen2", vocab=320)
    text = source.parent / "text.txt"
    assert run("eval", source, "--source", other, "--text", text) == 1
    assert "has another tokenizer or vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("on a card"), MemoryError()])
@pytest.mark.parametrize(("step", "recipe"), [("convert", "w4"), ("sensitivities", "auto")])
def test_out_of_memory_is_one_line_that_says_what_to_do(
    source, capsys, monkeypatch, error, step, recipe
):
    from engine_actor.quant import command

    def full(*_):
        raise error

    monkeypatch.setattr(command, step, full)
    assert convert(source, "out", "--recipe", recipe) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: --device cpu: out of memory; finished layers are kept")
    assert "--resume" in said


def test_out_of_memory_is_one_line_of_an_evaluation_too(source, capsys, monkeypatch):
    from engine_actor.quant import command

    def full(*_):
        raise torch.OutOfMemoryError("on a card")

    monkeypatch.setattr(command, "run_checkpoint", full)
    assert run("eval", source, "--text", source.parent / "text.txt", "--device", "cpu") == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == "error: --device cpu: out of memory; free some or take another --device"


@pytest.mark.parametrize(("weights", "steps"), [(2, 0), (3, 1)])
def test_a_disk_that_is_too_small_is_refused_or_not_saved_to(
    source, capsys, monkeypatch, weights, steps
):
    from engine_actor.quant import command

    config = open_checkpoint(source).config
    rows = token_rows(source.parent / "text.txt", "", source, 24).tokens
    states = 2 * 2 * rows.numel() * 4 * config.hidden  # two texts, each there twice
    least = states + weights * make_plan(config, fixed_recipe("w4")).weights
    usage = type("Usage", (), {"free": least - 1})
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: usage)
    assert convert(source, "out", "--tune-steps", steps) == 1
    assert "of disk are needed" in capsys.readouterr().err
    usage.free = least
    assert convert(source, "out", "--tune-steps", steps) == 0
    said = "tuning is not saved on its way: it would take 2 MiB of disk"
    assert (said in capsys.readouterr().out) == (steps > 0)


def test_ctrl_c_says_how_to_go_on(source, capsys, monkeypatch):
    from engine_actor.quant import command

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "convert", interrupted)
    assert convert(source, "out") == 130
    assert "finished layers are kept, --resume goes on" in capsys.readouterr().err


def test_a_full_disk_and_a_target_that_cannot_be_made_are_one_line(source, capsys, monkeypatch):
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    (source.parent / "file").write_text("")
    assert convert(source, "file/out") == 1
    err = capsys.readouterr().err
    assert "Not a directory" in err.splitlines()[-1]
    with monkeypatch.context() as patched:
        patched.setattr("engine_actor.quant.journal.save_file", full)
        assert convert(source, "out") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: I/O error: No space left on device")
    assert last.endswith("finished layers are kept, see --resume")
    assert not (source.parent / "out").exists()
    assert convert(source, "out", "--resume") == 0
