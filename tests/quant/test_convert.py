"""A whole conversion: what it writes, what reads it, and what it measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from engine_actor.core.plan import PrefillChunk
from engine_actor.errors import CheckpointError
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.progress import silent
from engine_actor.load.tokenizer import Tokenizer
from engine_actor.model.runner import build_runner
from engine_actor.ops import PackedLinear, dequantise
from engine_actor.quant.convert import convert
from engine_actor.quant.evaluate import run_checkpoint, score
from engine_actor.quant.plan import make_plan
from engine_actor.quant.recipe import Method
from engine_actor.quant.report import FILE
from engine_actor.quant.texts import TokenRows
from engine_actor.work.inputs import build_prefill
from tests.load.gguf_maker import HIDDEN, VOCAB, write_gguf
from tests.quant.conftest import token_rows

CPU = torch.device("cpu")
NEAREST = Method(rounding="nearest", search="none")


def _kl(folder, job):
    tokens, used = job.evaluation.tokens, job.source.usable_vocab_size()
    reference = run_checkpoint(job.source, tokens, CPU, silent)
    return score(
        run_checkpoint(open_checkpoint(folder), tokens, CPU, silent), reference, tokens, used
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_folder_is_a_checkpoint_of_the_promised_size_and_quality(make_job, tmp_path, family):
    job = make_job(family, "mixed")
    report = convert(job, tmp_path / "out", silent)
    made = open_checkpoint(tmp_path / "out")
    assert made.nbytes == report.plan.weights == make_plan(job.source.config, job.recipe).weights
    assert {(bits, group) for bits, group, _ in made.quantisation.kinds} == {
        (4, 32),
        (3, 32),
        (8, -1),
    }
    measured = _kl(tmp_path / "out", job)
    assert measured.kl == pytest.approx(report.rounded.kl, abs=1e-6)
    assert measured.perplexity == pytest.approx(report.rounded.perplexity, rel=1e-6)
    assert report.rounded.kl < 0.5


def test_the_config_names_recipe_source_text_and_what_was_measured(make_job, tmp_path):
    job = make_job("llama", "w3")
    report = convert(job, tmp_path / "out", silent)
    section = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert section["format_version"] == 1
    assert section["linears"]["layers.1.down"] == {"bits": 3, "group": 32}
    source = section["source"]
    assert source["name"] == "tiny"
    assert source["fingerprint"] == job.source.fingerprint
    assert source["recipe"]["method"]["rounding"] == "gptq"
    assert source["report"]["measured_on"]["text"] == "random 2"
    assert source["report"]["calibrated_on"]["sha256"] == job.calibration.digest
    assert source["report"]["kl"] == pytest.approx(report.rounded.kl, abs=1e-5)
    document = json.loads((tmp_path / "out" / FILE).read_text())
    assert [sorted(layer) for layer in document["layer_errors"]] == [
        ["down", "gate_up", "o", "qkv"]
    ] * 2
    assert all(0 < error < 0.2 for layer in document["layer_errors"] for error in layer.values())


def test_the_engine_runs_what_was_written(make_job, tmp_path):
    job = make_job("qwen2", "w4")
    convert(job, tmp_path / "out", silent)
    made = open_checkpoint(tmp_path / "out")
    runner = build_runner(made.config, made.weights(), numerics="exact")
    runner.resize_kv(8)
    ids = job.evaluation.tokens[0, :48]
    chunk = PrefillChunk(("t", 1), 0, 48, tuple(ids.tolist()), blocks=(0, 1, 2), samples=True)
    inputs = build_prefill([chunk], 16, CPU)
    hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
    found = runner.logits(hidden, torch.arange(48))[:, :275]
    whole = run_checkpoint(made, ids.view(1, -1), CPU, silent)
    expected = whole.hidden[0] @ dequantise(whole.head)[:275].t()
    assert torch.allclose(found, expected, atol=2e-2, rtol=1e-3)


def test_better_methods_give_smaller_errors(make_job, tmp_path):
    """On the layers' own inputs: plain rounding, then searched scales, then GPTQ."""
    errors = []
    for number, method in enumerate(
        (NEAREST, Method(rounding="nearest", search="activation"), Method())
    ):
        job = make_job("llama", "w3", method=method)
        job = dataclasses.replace(job, calibration=token_rows(24, 64, 1), evaluation=None)
        report = convert(job, tmp_path / f"out-{number}", silent)
        errors.append(report.layers[0])
    plain, searched, gptq = errors
    for short in ("qkv", "o", "gate_up", "down"):
        assert gptq[short] < searched[short]
    assert all(layer["qkv"] > 0 for layer in (plain, searched, gptq))


def test_plain_rounding_is_what_the_definition_says(make_job, tmp_path):
    """No calibration, no search: codes by hand from the source's own weights."""
    job = dataclasses.replace(make_job("llama", "w4", method=NEAREST), evaluation=None)
    convert(job, tmp_path / "out", silent)
    made = dict(open_checkpoint(tmp_path / "out").weights())
    for name, weight in job.source.weights():
        if not name.startswith("layers.") or name.endswith("norm"):
            continue
        groups = weight.weight.view(weight.weight.shape[0], -1, 32)
        scale = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
        expected = (groups / scale).round().clamp(-8, 7) * scale
        assert torch.equal(dequantise(made[name]), expected.view(weight.weight.shape))


@pytest.mark.parametrize(("hidden", "group"), [(64, 48), (96, 128), (64, 128)])
def test_a_group_that_does_not_divide_the_inputs_is_short_at_the_end(
    make_job, tmp_path, hidden, group
):
    """K = 576 with group 128 is one of these: ceil(K / group) groups, the last one short."""
    job = make_job("llama", "w4", group=group, hidden_size=hidden, intermediate_size=160)
    report = convert(job, tmp_path / "out", silent)
    made = open_checkpoint(tmp_path / "out")
    assert made.nbytes == report.plan.weights
    down = dict(made.weights())["layers.0.down"]
    assert isinstance(down, PackedLinear)
    assert down.scales.shape == (hidden, -(-160 // group))
    assert _kl(tmp_path / "out", job).kl < 0.5


def test_offsets_are_written_and_read(make_job, tmp_path):
    job = make_job("llama", "w3", offsets=True)
    report = convert(job, tmp_path / "out", silent)
    made = open_checkpoint(tmp_path / "out")
    weights = dict(made.weights())
    assert weights["layers.0.qkv"].offsets is not None
    assert made.nbytes == report.plan.weights
    assert _kl(tmp_path / "out", job).kl == pytest.approx(report.rounded.kl, abs=1e-6)


def test_some_scales_are_negative_and_serve_all_the_same(make_job, tmp_path):
    job = make_job("llama", "w4")
    convert(job, tmp_path / "out", silent)
    scales = dict(open_checkpoint(tmp_path / "out").weights())["layers.0.gate_up"].scales
    assert 0.2 < float((scales < 0).float().mean()) < 0.8


def test_a_packed_source_is_converted_too(make_job, tmp_path):
    job = make_job("llama", "w3", packed=True, bits=4, kind="offsets")
    report = convert(job, tmp_path / "out", silent)
    assert open_checkpoint(tmp_path / "out").nbytes == report.plan.weights
    assert report.rounded.kl < 0.5


def test_a_tied_head_stays_tied(make_job, tmp_path):
    job = make_job("llama", "w4", tie_word_embeddings=True, head_std=0.1)
    report = convert(job, tmp_path / "out", silent)
    made = dict(open_checkpoint(tmp_path / "out").weights())
    assert "head" not in made
    assert made["embed"].bits == 8
    assert _kl(tmp_path / "out", job).kl == pytest.approx(report.rounded.kl, abs=1e-6)


POISONED = [
    ("model.layers.1.mlp.down_proj.weight", "layers.1.down"),
    ("model.embed_tokens.weight", "embed"),
]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(("tensor", "name"), POISONED)
def test_weights_that_are_not_finite_are_refused_by_name(make_job, tmp_path, poison, tensor, name):
    from safetensors.torch import load_file, save_file

    job = make_job("llama")
    path = job.source.folder / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor][3, 3] = poison
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"^{name}: holds NaN or infinity"):
        convert(job, tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_weights_that_no_scale_reaches_are_refused(make_job, tmp_path):
    from safetensors.torch import load_file, save_file

    job = make_job("llama")
    path = job.source.folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e9
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.gate_up: holds weights over 65504"):
        convert(job, tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_is_a_source_like_any_other(make_job, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path)
    job = make_job("llama")
    texts = [
        TokenRows(rows.name, rows.tokens % VOCAB) for rows in (job.calibration, job.evaluation)
    ]
    job = dataclasses.replace(
        job, source=open_checkpoint(path), calibration=texts[0], evaluation=texts[1]
    )
    report = convert(job, tmp_path / "out", silent)
    made = open_checkpoint(tmp_path / "out")
    assert made.nbytes == report.plan.weights
    assert made.config.hidden == HIDDEN
    text = "the heat of the theatre"
    ids = Tokenizer.from_folder(path).encode(text)
    assert Tokenizer.from_folder(tmp_path / "out").encode(text) == ids
