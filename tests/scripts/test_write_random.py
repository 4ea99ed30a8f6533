"""A written random model: loads as a checkpoint, gives the random engine's tokens, every word of it
is text."""

from __future__ import annotations

import torch

import write_random
from configs.schema import AppArgs
from engine_actor.build import build_engine
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tokenizer import Tokenizer
from random_model import random_engine
from tests.engine.driver import Driver


def test_it_is_the_random_engines_model(tmp_path):
    folder = tmp_path / "model"
    assert write_random.main(["tiny", str(folder), "--device", "cpu"]) == 0
    settings = {"device": "cpu", "cpu_threads": 1, "kv": {"budget_mb": 1}}
    args = AppArgs.model_validate({"model": {"path": str(folder)}, "engine": settings})
    made = []
    for engine in (build_engine(args, folder), random_engine("tiny", settings)):
        driver = Driver(engine)
        driver.submit(0, range(3, 20), 12, ignore_eos=True)
        driver.run()
        made.append(driver.tokens(0))
    assert made[0] == made[1]


def test_a_dense_one_has_the_hubs_names_and_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(write_random, "SHARD_BYTES", 20_000)
    folder = tmp_path / "model"
    assert write_random.main(["tiny", str(folder), "--device", "cpu", "--dense"]) == 0
    checkpoint = open_checkpoint(folder)
    assert str(checkpoint.quantisation).startswith("dense")
    assert len(list(folder.glob("*.safetensors"))) > 2
    weights = dict(checkpoint.weights())
    assert weights["layers.1.qkv"].weight.dtype == torch.float16
    assert weights["layers.1.qkv"].bias is not None
    deviation = float(weights["layers.0.gate_up"].weight.float().std())
    assert 0.9 < deviation * checkpoint.config.hidden**0.5 < 1.1


def test_every_word_is_text_of_its_own():
    tokenizer = Tokenizer(write_random.word_tokenizer(1000))
    assert tokenizer.vocab_size == 1000
    words = range(len(write_random.SPECIALS) + 256, 1000)
    texts = [tokenizer.decode([token]) for token in words]
    assert len(set(texts)) == len(texts)
    assert all(text.isascii() and text.isprintable() and text[0] == " " for text in texts)
    assert tokenizer.decode(words) == "".join(texts)
    assert tokenizer.decode(tokenizer.encode("a é")) == "a é"
