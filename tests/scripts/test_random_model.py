"""Random models: the right shapes and bits, finite and spread logits, every setting reachable."""

from __future__ import annotations

import pytest
import torch

from engine_actor.model.runner import build_runner
from engine_actor.ops import PackedLinear
from random_model import SHAPES, random_checkpoint, random_engine, shortened
from tests.engine.driver import Driver

CPU = torch.device("cpu")


def test_the_shapes_are_qwens():
    """Parameters of Qwen2.5-3B and -7B as published: 3.09 and 7.62 billion."""
    counts = {}
    for name in ("3b", "7b"):
        checkpoint = random_checkpoint(SHAPES[name], CPU)
        counts[name] = sum(
            entry.nbytes * 8 / entry.bits for entry in checkpoint.entries if entry.bits
        )
    assert counts["3b"] == pytest.approx(3.09e9, rel=0.03)  # scales are counted as parameters
    assert counts["7b"] == pytest.approx(7.62e9, rel=0.03)


def test_the_mixed_7b_has_its_mlp_in_three_bits():
    checkpoint = random_checkpoint(SHAPES["7b-mixed"], CPU)
    bits = {entry.name: entry.bits for entry in checkpoint.entries}
    assert bits["layers.0.gate_up"] == bits["layers.27.down"] == 3
    assert bits["layers.0.qkv"] == bits["layers.27.o"] == 4
    assert bits["embed"] == bits["head"] == 8
    small = {e.name: e.bits for e in random_checkpoint(SHAPES["7b-4gib"], CPU).entries}
    assert {name for name in bits if small[name] != bits[name]} == {"embed"}
    assert small["embed"] == 4
    assert str(checkpoint.quantisation) == (
        "random: 2 x W8 group -1, 56 x W4 group 128, 56 x W3 group 128"
    )


def test_bytes_are_counted_before_anything_is_drawn():
    checkpoint = random_checkpoint(SHAPES["tiny"], CPU)
    drawn = 0
    for _, weight in checkpoint.weights():
        if isinstance(weight, PackedLinear):
            drawn += weight.nbytes
        else:
            drawn += weight.numel() * weight.element_size()
    assert checkpoint.nbytes == drawn


def test_a_seed_gives_the_same_weights():
    first, again, other = (
        dict(random_checkpoint(SHAPES["tiny"], CPU, seed).weights()) for seed in (1, 1, 2)
    )
    assert all(
        torch.equal(first[name].qweight, again[name].qweight)
        for name in first
        if isinstance(first[name], PackedLinear)
    )
    assert not torch.equal(first["embed"].qweight, other["embed"].qweight)


def test_logits_deviate_by_about_eight_and_tokens_vary():
    engine = random_engine("tiny", {"device": "cpu", "kv": {"budget_mb": 16}})
    driver = Driver(engine)
    for rid in range(4):
        assert driver.submit(rid, range(rid * 40, rid * 40 + 20), 24, ignore_eos=True) is None
    driver.run()
    driver.assert_all_free()
    texts = [driver.tokens(rid) for rid in range(4)]
    assert all(len(text) == 24 for text in texts)
    assert len({token for text in texts for token in text}) > 24
    checkpoint = random_checkpoint(SHAPES["tiny"], CPU)
    runner = build_runner(checkpoint.config, checkpoint.weights(), device="cpu")
    hidden = torch.randn(64, 64)
    logits = runner.logits(hidden, torch.arange(64))
    assert 5 < float(logits.std()) < 12


def test_every_setting_of_the_engine_can_be_given():
    engine = random_engine(
        "tiny",
        {
            "device": "cpu",
            "max_num_seqs": 3,
            "prefill_chunk_tokens": 32,
            "enable_prefill_decode_overlap": False,
            "cpu_threads": None,
            "kv": {"budget_mb": 8, "prefix_cache": False},
        },
        max_model_len=256,
    )
    assert engine.config.max_num_seqs == 3
    assert engine.config.enable_prefill_decode_overlap is False
    assert engine.kv.prefix_cache is False
    assert engine.facts.max_model_len == 256
    assert engine.facts.model == "tiny"
    assert engine.facts.weight_bytes == random_checkpoint(SHAPES["tiny"], CPU).nbytes


def test_a_shape_can_be_shortened():
    shape = shortened(SHAPES["3b"], 2)
    names = [entry.name for entry in random_checkpoint(shape, CPU).entries]
    assert "layers.1.down" in names
    assert "layers.2.qkv" not in names
