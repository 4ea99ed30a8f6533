"""A conversion may die anywhere: nothing half done loads, and going on gives the same bytes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from engine_actor.errors import CheckpointError
from engine_actor.load.progress import silent
from engine_actor.load.tiny import write_tiny
from engine_actor.quant import convert as converter
from engine_actor.quant.convert import convert
from engine_actor.quant.journal import Journal, at_work
from engine_actor.quant.program import sources
from engine_actor.quant.recipe import fixed_recipe
from tests.quant.conftest import token_rows

ROOT = Path(__file__).resolve().parents[2]


class Stopped(Exception):
    """Ends a run between two layers."""


def stop_before(layer):
    """A progress that raises there."""

    def progress(stage, done, total):
        if stage == "layers" and done == layer:
            raise Stopped

    return progress


def _contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_killed_at_every_file_it_writes_and_resumed_it_gives_the_same_bytes(tmp_path):
    write_tiny(tmp_path / "source", num_hidden_layers=3, hidden_size=32, intermediate_size=48)
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.quant.killed_runs", tmp_path / "source", tmp_path / "work"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.split("\n")[:-1]
    # Two files a layer, then the folder's own.
    assert [line.rsplit(" ", 1)[0] for line in lines] == [
        *["killed and resumed"] * 7,
        "undisturbed",
    ]


def test_stopped_between_layers_it_leaves_the_target_alone_and_goes_on(make_job, tmp_path):
    job = make_job("llama", num_hidden_layers=3)
    convert(job, tmp_path / "whole", silent)
    with pytest.raises(Stopped):
        convert(job, tmp_path / "out", stop_before(2))
    assert not (tmp_path / "out").exists()
    seen = []
    convert(job, tmp_path / "out", lambda *step: seen.append(step), resume=True)
    assert ("layers", 2, 3) in seen
    assert ("layers", 1, 3) not in seen[: seen.index(("layers", 3, 3))]
    assert _contents(tmp_path / "out") == _contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} >= {"out", "whole"}
    assert not list(tmp_path.glob("out.*"))


def test_an_unfinished_run_is_not_taken_for_a_new_one(make_job, tmp_path):
    job = make_job("llama")
    with pytest.raises(Stopped):
        convert(job, tmp_path / "out", stop_before(1))
    with pytest.raises(CheckpointError, match="unfinished run is here: go on with --resume"):
        convert(job, tmp_path / "out", silent)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"recipe": fixed_recipe("w3", 32)}, r"recipe \(name: w4, now w3\)"),
        ({"calibration": token_rows(6, 64, 9)}, "calibration text"),
        ({"evaluation": None}, r"evaluation text \(now none\)"),
    ],
)
def test_another_job_cannot_go_on_where_this_one_stopped(make_job, tmp_path, change, named):
    job = make_job("llama")
    with pytest.raises(Stopped):
        convert(job, tmp_path / "out", stop_before(1))
    with pytest.raises(CheckpointError, match=f"the unfinished run had another {named}"):
        convert(dataclasses.replace(job, **change), tmp_path / "out", silent, resume=True)


def test_another_program_cannot_go_on_with_it(make_job, tmp_path, monkeypatch):
    job = make_job("llama")
    with pytest.raises(Stopped):
        convert(job, tmp_path / "out", stop_before(1))
    monkeypatch.setattr(converter, "program", lambda: "of tomorrow")
    with pytest.raises(CheckpointError, match=r"had another program .*, now of tomorrow"):
        convert(job, tmp_path / "out", silent, resume=True)


def test_the_program_is_all_that_decides_codes():
    names = {path.name for path in sources()}
    assert names >= {"rounding.py", "gptq.py", "tune.py", "round_columns.cu", "round_columns.py"}


@pytest.mark.parametrize("now", [{}, {"rates": None, "steps": 3}])
def test_a_setting_that_is_there_and_says_nothing_is_a_difference_too(tmp_path, now):
    Journal(tmp_path / "out", {"tuning": {"rates": {}, "steps": 3}}, resume=False)
    with pytest.raises(CheckpointError, match=r"the unfinished run had another tuning \("):
        Journal(tmp_path / "out", {"tuning": now}, resume=True)


def test_two_at_once_do_not_meet_in_one_folder(make_job, tmp_path):
    job = make_job("llama")
    with at_work(tmp_path / "out"), pytest.raises(CheckpointError, match="another process is at"):
        convert(job, tmp_path / "out", silent, resume=True)
    convert(job, tmp_path / "out", silent, resume=True)
    assert (tmp_path / "out/config.json").is_file()


@pytest.mark.parametrize("damage", ["cut", "gone", "empty journal"])
def test_a_damaged_unfinished_run_is_refused_in_one_line(make_job, tmp_path, damage):
    job = make_job("llama", num_hidden_layers=3)
    with pytest.raises(Stopped):
        convert(job, tmp_path / "out", stop_before(2))
    folder = tmp_path / "out.unfinished"
    layer = folder / "layer-00000.safetensors"
    if damage == "cut":
        layer.write_bytes(layer.read_bytes()[:-7])
    elif damage == "gone":
        layer.unlink()
    else:
        (folder / "journal.json").write_text("{}")
    expected = "another version" if damage == "empty journal" else "layer-00000.safetensors: "
    with pytest.raises(CheckpointError, match=expected) as refused:
        convert(job, tmp_path / "out", silent, resume=True)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
