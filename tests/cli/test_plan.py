"""`plan` for a card that is not here: a table, plain values, an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_actor import capabilities
from engine_actor.load.tiny import write_tiny
from serve_app import doctor
from serve_app.cli import main
from serve_app.doctor import memory_findings


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_tiny(tmp_path, "llama", packed=True))


def test_the_table_ends_with_what_fits(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", folder, "--card-mb", "4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["card", "4096", "MiB"]
    assert lines[-1].startswith("context 512 tokens; sequences at once: 128 of that")


def test_plain_values(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", folder, "--card-mb", "4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["allowance"] == (4096 - 384) << 20
    assert sum(found["parts"].values()) + found["kv"] <= found["allowance"]


def test_what_does_not_fit_is_exit_code_1(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", folder, "--card-mb", "400"]) == 1
    assert "does not fit: " in capsys.readouterr().out


def test_a_context_beyond_the_checkpoints_is_refused_as_a_start_would(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", folder, "--max-model-len", "99999"]
    assert main(["plan", "--card-mb", "4096", *flags]) == 1
    said = "model.max_model_len: 99999 is more than the checkpoint's"
    assert said in capsys.readouterr().err
    assert main(["doctor", "--device", "cpu", *flags]) == 1
    assert said in capsys.readouterr().out


def test_without_a_gpu_a_card_must_be_named(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "usable_gpus", lambda: 0)
    assert main(["plan", "--model", folder]) == 2
    assert capsys.readouterr().err == ("error: torch finds no GPU here; name a card by --card-mb\n")


def test_the_doctor_calls_a_plan_that_does_not_fit_a_problem(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = capabilities.memory_plan
    monkeypatch.setattr(
        capabilities, "memory_plan", lambda args, where, card, sm: real(args, where, 400, 86)
    )
    found = memory_findings(doctor.AppArgs(), Path(folder))
    assert {finding.area for finding in found} == {"memory"}
    assert found[-1].level == "problem"
