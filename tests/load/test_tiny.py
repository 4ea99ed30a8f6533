"""The random test models: read back, they are transformers' models of their family, and their best
logits lie far enough apart for equality tests (decisions on numbers: ten bounds).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine_actor.core.plan import PrefillChunk
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import write_tiny
from engine_actor.model.runner import build_runner
from engine_actor.work.inputs import build_prefill
from tests.hub_reference import hub_model

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
BLOCKS = tuple(range(16))


def _ids(count: int) -> list[int]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(3, 270, (count,), generator=draw).tolist()


def _logits(folder: Path, numerics: str, ids: list[int], step: int) -> torch.Tensor:
    """fp32 [T, vocab] in chunks of `step` tokens."""
    opened = open_checkpoint(folder)
    runner = build_runner(opened.config, opened.weights(), numerics=numerics)
    runner.resize_kv(len(BLOCKS))
    rows = []
    for start in range(0, len(ids), step):
        chunk = ids[start : start + step]
        end = start + len(chunk)
        plan = PrefillChunk(("t", 1), start, end, tuple(chunk), BLOCKS, samples=True)
        inputs = build_prefill([plan], 16, runner.device)
        hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
        rows.append(runner.logits(hidden, torch.arange(len(chunk))))
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"tie_word_embeddings": True, "shards": 3, "dtype": "bfloat16"},
        {"packed": True, "kind": "offsets"},
        {"packed": True, "kind": "zeros", "group": 64},
        {"packed": True, "bits": 3, "group": -1, "tie_word_embeddings": True},
    ],
    ids=["fp32", "bf16 tied shards", "W4 offsets", "W4 zeros", "W3 tied"],
)
def test_logits_equal_transformers(tmp_path: Path, family: str, how: dict[str, Any]) -> None:
    folder = write_tiny(tmp_path, family, **how)
    ids = _ids(20)
    with torch.inference_mode():
        expected = hub_model(folder)(torch.tensor([ids])).logits[0]
    ours = _logits(folder, "exact", ids, 20)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_the_median_gap_is_over_ten_bounds(tmp_path: Path, packed: bool) -> None:
    """The bound: the largest difference of a logit between batches of one row and of sixteen."""
    folder, ids = write_tiny(tmp_path, packed=packed), _ids(192)
    alone, batch = _logits(folder, "fast", ids, 1), _logits(folder, "fast", ids, 16)
    best = batch.topk(2).values
    gap = (best[:, 0] - best[:, 1]).median().item()
    assert gap > 1.0
    assert gap > 10 * (alone - batch).abs().max().item()


def test_the_head_can_be_scaled(tmp_path: Path) -> None:
    one = _logits(write_tiny(tmp_path / "one"), "exact", _ids(8), 8)
    ten = _logits(write_tiny(tmp_path / "ten", head_std=10.0), "exact", _ids(8), 8)
    assert ten.std() > 5 * one.std()


@pytest.mark.parametrize("packed", [False, True])
def test_a_seed_gives_the_same_bytes(tmp_path: Path, packed: bool) -> None:
    a, b, c = (
        write_tiny(tmp_path / n, seed=s, packed=packed) for n, s in [("a", 1), ("b", 1), ("c", 2)]
    )
    names = sorted(path.name for path in a.iterdir())
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in names)
    assert (a / "model.safetensors").read_bytes() != (c / "model.safetensors").read_bytes()


def test_every_text_comes_back(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == open_checkpoint(folder).usable_vocab_size() == 275
    for text in ["The sand is in the sea.", "你好🙂", "a\n\tb  c\0", "é"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.encode(" the").tokens == ["Ġthe"]
