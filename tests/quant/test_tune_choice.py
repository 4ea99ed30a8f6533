"""What may be tuned where: by a bound on the memory, with a reason, before any work."""

from __future__ import annotations

import dataclasses
import re

import pytest

from engine_actor.errors import CheckpointError
from engine_actor.load.tiny import tiny_config
from engine_actor.model.config import ModelConfig
from engine_actor.quant import command
from engine_actor.quant.command import QuantizeOptions
from engine_actor.quant.plan import layer_weights
from engine_actor.quant.tune import Tuning
from engine_actor.quant.tune_choice import choose_tuning, default_steps, needed_bytes
from tests.quant.conftest import token_rows
from tests.quant.test_plan import config_7b

TUNING = Tuning(token_rows(4, 512, 1), 100)
SCALES = dataclasses.replace(TUNING, codes=False)
GIB = 1 << 30


def test_the_weights_of_a_7b_by_hand():
    assert layer_weights(config_7b()) == 28 * (
        (3584 + 2 * 512) * 3584 + 3584 * 3584 + 3 * 3584 * 18944
    )


def test_trained_codes_are_most_of_the_memory():
    config = config_7b()
    spared = needed_bytes(config, TUNING) - needed_bytes(config, SCALES)
    assert spared == 14 * layer_weights(config)
    assert 100 * GIB < needed_bytes(config, TUNING) < 140 * GIB
    assert needed_bytes(config, SCALES) < 40 * GIB


@pytest.mark.parametrize(
    ("free", "codes", "line"),
    [
        (141 * GIB, True, "in 100 steps, codes and scales"),
        (80 * GIB, False, "scales only: with codes it takes .* MiB, 73,728 MiB are free for it"),
    ],
)
def test_it_falls_back_with_a_reason(free, codes, line):
    chosen, said = choose_tuning(config_7b(), TUNING, free)
    assert chosen.codes == codes
    assert re.search(line, said)


def test_what_was_asked_for_and_cannot_be_is_refused_in_one_line():
    with pytest.raises(CheckpointError, match=r"^--tune-steps 100: .* 0 converts without$"):
        choose_tuning(config_7b(), TUNING, 10 * GIB)
    chosen, said = choose_tuning(config_7b(), TUNING, 10 * GIB, asked=False)
    assert chosen is None
    assert said.startswith("  not tuned as a whole: tuning takes ")


def test_the_bound_holds_what_is_held_at_a_tiny_size():
    """The parts that can be counted: four fp32 numbers a trained code, both heads."""
    config = ModelConfig.from_hf(tiny_config("llama"), None)
    held = 16 * layer_weights(config) + 2 * 4 * config.vocab_size * config.hidden
    assert needed_bytes(config, TUNING) > held


@pytest.mark.parametrize(("rows", "steps"), [(256, 256), (4000, 300), (60, 60), (1, 1)])
def test_a_short_text_is_not_learnt_by_heart(rows, steps):
    assert default_steps(rows, 8) == steps


@pytest.mark.parametrize(("steps", "expected"), [(None, None), (0, None), (3, 3)])
def test_the_command_tunes_on_a_cpu_only_when_told(
    make_job, tmp_path, monkeypatch, steps, expected
):
    jobs = []

    def converted(job, target, progress, resume):
        jobs.append(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "convert", converted)
    folder = make_job("llama").source.folder
    said: list[str] = []
    options = QuantizeOptions(
        str(folder), tmp_path / "out", "w3", tune_steps=steps, device="cpu", text=None
    )
    with pytest.raises(KeyboardInterrupt):
        command.quantize(options, tmp_path, said.append)
    tuning = jobs[0].tuning
    assert (None if tuning is None else tuning.steps) == expected
    assert any("tuned as a whole in 3 steps" in line for line in said) == (expected == 3)
