"""Tuning as a whole: what is trained is what is written, and it helps on text it never saw."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.progress import silent
from engine_actor.quant import tune as tuning_module
from engine_actor.quant.convert import convert
from engine_actor.quant.evaluate import embed, run_checkpoint
from engine_actor.quant.stream import LayerReader
from engine_actor.quant.trainable import (
    TrainableLayer,
    TrainableLinear,
    TrainableModel,
    TrainableNorm,
    divergence,
)
from engine_actor.quant.tune import Rates, Tuning, share_of_rate
from tests.quant.conftest import token_rows

CPU = torch.device("cpu")
QUICK = Rates(1e-2, 1e-2, 3e-3, 3e-3)


def tuning(codes=True, steps=50, rates=QUICK, **more) -> Tuning:
    """Short rows, large steps."""
    return Tuning(token_rows(160, 32, 3), steps, codes, batch=8, rates=rates, **more)


def _contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _trainable(folder, length: int, source=None) -> TrainableModel:
    """Of a converted folder; with `source`, a checkpoint, its codes too."""
    made = open_checkpoint(folder)
    weights = dict(made.weights())
    layers = []
    for index in range(made.config.n_layers):
        at = f"layers.{index}."
        found = {n.removeprefix(at): w for n, w in weights.items() if n.startswith(at)}
        norms = {n: w for n, w in found.items() if n.endswith("norm")}
        numbers = {}
        if source is not None:
            dense = LayerReader(source, CPU).layer(index).linears
            numbers = {short: one.weight for short, one in dense.items()}
        layers.append(TrainableLayer(made.config, found, numbers, norms, CPU))
    return TrainableModel(made.config, layers, weights["norm"], length, CPU)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("mistral", {"sliding_window": 16})],
)
def test_what_is_trained_is_what_the_engine_runs(make_job, tmp_path, family, more, codes):
    job = make_job(family, "mixed", offsets=family == "qwen3", **more)
    convert(job, tmp_path / "out", silent)
    made, tokens = open_checkpoint(tmp_path / "out"), job.evaluation.tokens
    model = _trainable(tmp_path / "out", tokens.shape[1], job.source if codes else None)
    with torch.no_grad():
        found = model(embed(dict(made.weights())["embed"], tokens))
    expected = run_checkpoint(made, tokens, CPU, silent).hidden
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_the_divergence_and_its_slope_are_those_of_the_definition():
    draw = torch.Generator().manual_seed(1)
    rows, theirs = (torch.randn(7, 12, generator=draw) for _ in range(2))
    head, their_head = (torch.randn(50, 12, generator=draw) for _ in range(2))
    rows.requires_grad_()
    found = divergence(rows, head, theirs, their_head)
    (slope,) = torch.autograd.grad(found, rows)
    ours = torch.log_softmax(rows @ head.t(), -1)
    wanted = torch.log_softmax(theirs @ their_head.t(), -1)
    expected = torch.nn.functional.kl_div(ours, wanted, log_target=True, reduction="sum")
    (expected_slope,) = torch.autograd.grad(expected, rows)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert torch.allclose(slope, expected_slope, atol=1e-5)


@pytest.mark.parametrize("offsets", [False, True])
def test_a_linear_packs_to_exactly_what_it_multiplied_with(make_job, tmp_path, offsets):
    from engine_actor.ops import dequantise

    job = make_job("llama", "w3", group=48, offsets=offsets)
    convert(dataclasses.replace(job, evaluation=None), tmp_path / "out", silent)
    packed = dict(open_checkpoint(tmp_path / "out").weights())["layers.1.down"]
    source = LayerReader(job.source, CPU).layer(1).linears["down"].weight
    linear = TrainableLinear(packed, source, CPU)
    assert torch.equal(linear.weight(), dequantise(packed))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for kind, leaf in linear.parameters():
            leaf += torch.randn(leaf.shape, generator=draw) * (0.01 if kind == "scales" else 2.0)
    linear.confine()
    moved = linear.packed()
    assert torch.equal(linear.weight(), dequantise(moved))
    assert not torch.equal(moved.qweight, packed.qweight)
    assert (moved.offsets is not None) == offsets


def test_a_norm_is_rounded_to_the_dtype_it_came_in():
    norm = TrainableNorm(torch.tensor([1.0, 2.0, 0.5], dtype=torch.bfloat16), 1e-6, CPU)
    with torch.no_grad():
        norm.change += 0.0123
    stored = norm.stored()
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored.float(), norm.weight())


@pytest.mark.parametrize("codes", [False, True])
def test_tuned_is_closer_to_the_source_on_text_it_never_saw(make_job, tmp_path, codes):
    job = make_job("qwen2", "w3", head_std=0.3)
    plain = convert(job, tmp_path / "plain", silent)
    tuned = convert(dataclasses.replace(job, tuning=tuning(codes)), tmp_path / "tuned", silent)
    assert tuned.scores.untuned == plain.scores.rounded
    assert tuned.tuned["kept"]
    assert tuned.rounded.kl < (0.85 if codes else 0.95) * plain.rounded.kl
    made, was = open_checkpoint(tmp_path / "tuned"), open_checkpoint(tmp_path / "plain")
    assert made.nbytes == was.nbytes == tuned.plan.weights
    name = "layers.0.qkv"
    same = torch.equal(dict(made.weights())[name].qweight, dict(was.weights())[name].qweight)
    assert same == (not codes)


def test_what_does_not_help_is_thrown_away(make_job, tmp_path):
    job = make_job("llama", "w4")
    convert(job, tmp_path / "plain", silent)
    wild = dataclasses.replace(job, tuning=tuning(steps=3, rates=Rates(5.0, 5.0, 0.9, 0.9)))
    report = convert(wild, tmp_path / "tuned", silent)
    assert not report.tuned["kept"]
    assert any("no gain: left as it was" in line for line in report.lines())
    name = "model.safetensors"
    assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "tuned" / name).read_bytes()


class Stopped(Exception):
    """Ends a run between two steps."""


def test_stopped_in_the_middle_and_resumed_it_gives_the_same_bytes(make_job, tmp_path, monkeypatch):
    job = dataclasses.replace(make_job("llama", "w3"), tuning=tuning(steps=8))
    convert(job, tmp_path / "whole", silent)
    monkeypatch.setattr(tuning_module, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(tuning_module, "SAVE_SHARE", 0)

    def stop(stage, done, total):
        if (stage, done) == ("tune", 5):
            raise Stopped

    with pytest.raises(Stopped):
        convert(job, tmp_path / "out", stop)
    seen = []
    convert(job, tmp_path / "out", lambda *step: seen.append(step), resume=True)
    steps = [done for stage, done, _ in seen if stage == "tune"]
    assert steps == [5, 6, 7, 8]
    assert _contents(tmp_path / "out") == _contents(tmp_path / "whole")
    assert not list(tmp_path.glob("out.*"))


def test_without_room_no_state_is_kept_and_the_bytes_are_the_same(make_job, tmp_path, monkeypatch):
    job = dataclasses.replace(make_job("llama", "w3"), tuning=tuning(steps=4))
    convert(job, tmp_path / "saved", silent)
    monkeypatch.setattr(tuning_module, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(tuning_module, "SAVE_SHARE", 0)
    kept = []

    def look(stage, done, total):
        kept.append((tmp_path / "out.unfinished" / tuning_module.STATE).exists())

    spared = dataclasses.replace(job.tuning, saved=False)
    convert(dataclasses.replace(job, tuning=spared), tmp_path / "out", look)
    assert not any(kept)
    assert _contents(tmp_path / "out") == _contents(tmp_path / "saved")


def test_the_seed_decides_the_order_of_the_text(make_job, tmp_path):
    job = make_job("llama", "w3")
    digests = []
    for number, seed in enumerate((0, 0, 1)):
        one = dataclasses.replace(job, tuning=tuning(steps=4, seed=seed))
        convert(one, tmp_path / f"out-{number}", silent)
        digests.append((tmp_path / f"out-{number}" / "model.safetensors").read_bytes())
    assert digests[0] == digests[1] != digests[2]


def test_the_rate_rises_once_and_ends_at_nothing():
    shares = [share_of_rate(step, 100) for step in range(100)]
    assert shares[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert all(a >= b for a, b in itertools.pairwise(shares[4:]))
    assert 0 < shares[-1] < 1e-3
    assert share_of_rate(0, 1) == 1.0
