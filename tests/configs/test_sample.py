"""The committed sample is what the schema says, and every preset is a legal configuration."""

from __future__ import annotations

import pytest
import yaml

from configs.sample import render
from configs.schema import AppArgs


def test_committed_sample_is_fresh(project_root):
    committed = (project_root / "configs" / "sample.yaml").read_text(encoding="utf-8")
    assert committed == render(), "run: python -m configs.sample > configs/sample.yaml"


def test_the_sample_says_the_defaults():
    assert AppArgs.model_validate(yaml.safe_load(render())) == AppArgs()


def test_every_setting_of_the_sample_is_explained():
    bare = [line.strip() for line in render().splitlines() if ": " in line and "#" not in line]
    assert bare == []


def test_choices_and_bounds_are_shown():
    lines = {line.strip().partition(":")[0]: line for line in render().splitlines()}
    assert "one of fast, exact" in lines["numerics"]
    assert ">= 1, <= 256" in lines["block_tokens"]
    assert "> 0" in lines["lease_s"]


@pytest.mark.parametrize("name", ["cpu-demo", "rtx3050-4gb"])
def test_every_preset_is_legal(name, project_root):
    path = project_root / "configs" / "presets" / f"{name}.yaml"
    args = AppArgs.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert args.model.path == "demo"


def test_no_preset_is_left_untested(project_root):
    names = {path.stem for path in (project_root / "configs" / "presets").glob("*.yaml")}
    assert names == {"cpu-demo", "rtx3050-4gb"}
