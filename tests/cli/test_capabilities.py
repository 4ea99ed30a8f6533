"""What the doctor says of a checkpoint: the choice that the engine itself would make."""

from __future__ import annotations

import pytest

from configs.schema import AppArgs, EngineConfig
from engine_actor.capabilities import checkpoint_on_disk, describe_choices, describe_device
from engine_actor.errors import CheckpointError
from engine_actor.load.tiny import write_tiny
from serve_app.doctor import choice_findings


@pytest.fixture
def packed(tmp_path):
    """A tiny packed checkpoint."""
    folder = tmp_path / "tiny"
    write_tiny(folder, packed=True)
    return folder


def test_fast_and_exact_name_their_backends(packed, tmp_path):
    checkpoint = checkpoint_on_disk(str(packed), tmp_path)
    fast = "\n".join(describe_choices(EngineConfig(device="cpu"), "cpu", checkpoint))
    assert "numerics fast: activations float32, KV float32" in fast
    assert "reference.dequantise: fits" in fast
    exact = describe_choices(EngineConfig(device="cpu", numerics="exact"), "cpu", checkpoint)
    assert any(line.startswith("linears, any number of rows: exact.tiles") for line in exact)
    assert any("cpu.int4: bf16 activations" in line for line in exact)


def test_the_device_is_described():
    assert describe_device("cpu").startswith("CPU with ")


def test_a_demo_that_is_not_prepared_is_not_fetched(tmp_path):
    assert checkpoint_on_disk("demo", tmp_path) is None
    assert checkpoint_on_disk("org/model", tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/nowhere", "a/b/c", "nope", "https://huggingface.co/org/name"])
def test_a_name_by_which_nothing_is_fetched_is_a_problem(path):
    """A start would refuse it; the doctor had said that it would be fetched."""
    args = AppArgs.model_validate({"model": {"path": path}, "engine": {"device": "cpu"}})
    found = choice_findings(args)
    assert found[-1].level == "problem"
    assert found[-1].text.endswith("no such folder, and neither 'demo' nor a Hub id (org/name)")


def test_a_folder_that_is_no_checkpoint_is_a_problem(tmp_path):
    with pytest.raises(CheckpointError):
        checkpoint_on_disk(str(tmp_path), tmp_path)
    args = AppArgs.model_validate({"model": {"path": str(tmp_path)}, "engine": {"device": "cpu"}})
    found = choice_findings(args)
    assert [finding.level for finding in found] == ["problem"]
    assert "not a checkpoint" in found[0].text


def test_settings_that_contradict_each_other_are_a_problem(packed):
    engine = {"device": "cpu", "kv": {"dtype": "int8"}}
    found = choice_findings(
        AppArgs.model_validate({"model": {"path": str(packed)}, "engine": engine})
    )
    assert found[-1].level == "problem"
    why = "read by the CUDA kernels only, and engine.device is cpu"
    assert found[-1].text == f"engine.kv.dtype: int8 is {why}"


def test_a_path_that_cannot_be_looked_up_is_a_problem():
    args = {"model": {"path": "a" * 300}, "engine": {"device": "cpu"}}
    found = choice_findings(AppArgs.model_validate(args))
    assert found[-1].level == "problem"
    assert "cannot be looked up (File name too long)" in found[-1].text


def test_a_device_that_cannot_be_had_is_a_problem(monkeypatch):
    monkeypatch.setattr("engine_actor.capabilities.usable_gpus", lambda: 0)
    found = choice_findings(AppArgs.model_validate({"engine": {"device": "cuda"}}))
    assert [finding.level for finding in found] == ["problem"]
    assert "engine.device: cuda" in found[0].text
