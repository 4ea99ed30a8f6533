"""Perplexity and KL against transformers' own model and torch's own losses."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_actor.errors import CheckpointError
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.progress import silent
from engine_actor.load.tiny import write_tiny
from engine_actor.quant import evaluate
from engine_actor.quant.convert import convert
from engine_actor.quant.evaluate import run_checkpoint, score
from engine_actor.quant.texts import token_rows
from tests.quant.conftest import token_rows as random_rows

CPU = torch.device("cpu")
SMALL = {"head_std": 0.05}  # a head so flat that perplexities are readable


def _log_probabilities(folder, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.log_softmax(model(tokens).logits[:, :-1].double(), -1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_scores_are_those_of_transformers(tmp_path, family, monkeypatch):
    monkeypatch.setattr(evaluate, "LOGITS_AT_ONCE", 2000)  # several slices of rows
    write_tiny(tmp_path / "a", family, seed=1, **SMALL)
    write_tiny(tmp_path / "b", family, seed=2, **SMALL)
    tokens = random_rows(5, 40, 3).tokens
    ours = run_checkpoint(open_checkpoint(tmp_path / "a"), tokens, CPU, silent)
    source = run_checkpoint(open_checkpoint(tmp_path / "b"), tokens, CPU, silent)
    found = score(ours, source, tokens, 304)
    p, q = (_log_probabilities(tmp_path / name, tokens) for name in ("b", "a"))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum") / (5 * 39)
    loss = torch.nn.functional.nll_loss(q.flatten(0, 1), tokens[:, 1:].flatten())
    assert found.positions == 5 * 39
    assert found.kl == pytest.approx(float(kl), rel=1e-3)
    assert found.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-3)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def test_a_model_has_no_divergence_from_itself(tmp_path):
    write_tiny(tmp_path / "a", packed=True)
    tokens = random_rows(2, 32, 3).tokens
    run = run_checkpoint(open_checkpoint(tmp_path / "a"), tokens, CPU, silent)
    found = score(run, run, tokens, 275)
    assert found.kl == 0.0
    assert found.top1 == 1.0


def test_rows_are_cut_from_a_text_and_from_the_built_in_ones(tmp_path):
    write_tiny(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April. " * 20)
    rows = token_rows(text, "", tmp_path / "model", rows=3, length=64)
    assert rows.name == "text.txt"
    assert rows.tokens.shape == (3, 64)
    for name in ("jargon", "handbook"):
        assert token_rows(None, name, tmp_path / "model", rows=16).tokens.shape == (16, 512)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"short", "has 5 tokens, at least 64 are needed"), (b"\xff\xfe\x00", "is not UTF-8 text")],
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path, content, reason):
    write_tiny(tmp_path / "model")
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        token_rows(tmp_path / "text.txt", "", tmp_path / "model", rows=1, length=64)


def test_the_report_of_a_conversion_is_what_eval_measures(make_job, tmp_path):
    job = make_job("llama", **SMALL)
    report = convert(job, tmp_path / "out", silent)
    tokens = job.evaluation.tokens
    source, made = (
        run_checkpoint(checkpoint, tokens, CPU, silent)
        for checkpoint in (job.source, open_checkpoint(tmp_path / "out"))
    )
    found = score(made, source, tokens, job.source.usable_vocab_size())
    assert report.rounded.kl == pytest.approx(found.kl, rel=1e-4)
    assert report.rounded.perplexity == pytest.approx(found.perplexity, rel=1e-6)
