"""The command line: flags win over the environment, that over the file; bad values are one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from configs.load import ConfigError
from configs.schema import AppArgs
from serve_app.cli import READER_GONE, build_parser, main, request_of
from serve_app.cli_options import args_of, preset_names


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """No DEEPINFER_ setting of the machine reaches a test."""
    for name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)


def _args(*flags: str) -> AppArgs:
    return args_of(build_parser().parse_args(["serve", *flags]))


def test_without_flags_the_defaults_hold():
    assert _args() == AppArgs()


def test_the_overlap_switch_is_on_and_can_be_switched_off():
    """S-67."""
    assert _args().engine.enable_prefill_decode_overlap is True
    assert _args("--no-prefill-decode-overlap").engine.enable_prefill_decode_overlap is False


def test_flags_reach_their_place():
    args = _args(
        "--model", "/models/x", "--numerics", "exact", "--kv-budget-mb", "64", "--no-prefix-cache",
        "--max-partial-prefills", "1", "--reserve-memory-mb", "0",
        "--overlap-mode", "mixed", "--overlap-max-ctas", "100",
    )  # fmt: skip
    assert args.model.path == "/models/x"
    assert args.engine.numerics == "exact"
    assert args.engine.kv.budget_mb == 64
    assert args.engine.kv.prefix_cache is False
    assert args.engine.max_partial_prefills == 1
    assert args.engine.reserve_memory_mb == 0
    assert args.engine.overlap_mode == "mixed"
    assert args.engine.overlap_max_ctas == 100


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path, monkeypatch):
    file = tmp_path / "settings.yaml"
    file.write_text("engine: {max_num_seqs: 1, max_queue: 1, drain_s: 1.5}\n")
    monkeypatch.setenv("DEEPINFER_ENGINE__MAX_NUM_SEQS", "2")
    monkeypatch.setenv("DEEPINFER_ENGINE__MAX_QUEUE", "2")
    engine = _args("--config", str(file), "--max-num-seqs", "3").engine
    assert (engine.max_num_seqs, engine.max_queue, engine.drain_s) == (3, 2, 1.5)


def test_a_whole_serve_configuration_is_read_too(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("applications:\n- {name: default, args: {engine: {max_queue: 7}}}\n")
    assert _args("--config", str(file)).engine.max_queue == 7


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_read(name):
    assert _args("--preset", name).engine.max_num_seqs < AppArgs().engine.max_num_seqs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine: {max_num_seqs: 0}", "engine.max_num_seqs"),
        ("engin: {}", "engin"),
        ("- a list", "must hold settings by name"),
        ("a: [", "settings.yaml"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_key(tmp_path, text, words):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        _args("--config", str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xff", "is not UTF-8 text"),
        (b"[" * 5000, "is nested too deeply"),
        (b"applications: x", "no application"),
        (b"applications: [{args: 5}]", "must hold settings by name"),
        (b"applications: [{args: []}]", "must hold settings by name"),
    ],
)
def test_a_file_that_is_no_settings_is_one_line(tmp_path, capsys, raw, words):
    path = tmp_path / "settings.yaml"
    path.write_bytes(raw)
    assert main(["doctor", "--config", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["plan", "--card-mb", "0"], "--card-mb 0: must be at least 1"),
        (["plan", "--card-mb", str(10**20)], "--card-mb 1" + "0" * 20 + ": must be at most"),
        (["plan", "--card-mb", "4096", "--sm", "-1"], "--sm -1: must be at least 1"),
        (["eval", "demo", "--threads", str(10**12)], "must be at most 4096"),
        (["quantize", "demo", "x", "--threads", "0"], "--threads 0: must be at least 1"),
        (["quantize", "demo", "x", "--tune-steps", "-1"], "--tune-steps -1: must be at least 0"),
    ],
)
def test_numbers_out_of_range_are_one_line(capsys, flags, words):
    assert main(flags) == 1
    assert words in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_fault():
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import sys; from serve_app.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "doctor"]
    found = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (found.returncode, found.stderr) == (READER_GONE, b"")


def test_a_missing_file_is_an_exit_code_and_one_line(tmp_path, capsys):
    assert main(["doctor", "--config", str(tmp_path / "none.yaml")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_request_of_generate():
    parse = build_parser().parse_args
    plain = request_of(parse(["generate", "--max-tokens", "3", "--seed", "5", "Hi"]), "Hi")
    assert plain == {"max_tokens": 3, "temperature": 0.0, "top_p": 1.0, "seed": 5, "prompt": "Hi"}
    chat = request_of(parse(["generate", "--chat", "--stop", "a", "--stop", "b"]), "Hi")
    assert chat["messages"] == [{"role": "user", "content": "Hi"}]
    assert chat["stop"] == ["a", "b"]
