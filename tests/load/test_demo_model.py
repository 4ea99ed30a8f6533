"""The real demo through ModelRunner: transformers' logits on the same weights, and Paris."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from engine_actor.core.plan import DecodeSlot, PrefillChunk
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.runner import ModelRunner, build_runner
from engine_actor.work.inputs import build_decode, build_prefill
from tests.hub_reference import hub_model

BLOCK, BLOCKS = 16, tuple(range(8))
PARIS = "The capital of France is"
LONGER = (
    "Alan Turing was born in 1912 in London. He is known for the Turing machine, for breaking "
    "codes at Bletchley Park, and for"
)


def _runner(folder: Path, numerics: str) -> ModelRunner:
    opened = open_checkpoint(folder)
    runner = build_runner(
        opened.config,
        opened.weights(),
        device="cpu",
        numerics=numerics,
        block_tokens=BLOCK,
        dense_prefill_copy="off",
        used_vocab=opened.usable_vocab_size(),
    )
    runner.resize_kv(len(BLOCKS))
    return runner


@pytest.fixture(scope="module")
def exact(demo_folder: Path) -> ModelRunner:
    return _runner(demo_folder, "exact")


@pytest.fixture(scope="module")
def oracle(demo_folder: Path) -> transformers.PreTrainedModel:
    return hub_model(demo_folder)


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_folder / "tokenizer.json"))


def _run(runner: ModelRunner, inputs: BatchInputs, rows: torch.Tensor) -> torch.Tensor:
    hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
    return runner.logits(hidden, rows)


def _prefill(runner: ModelRunner, ids: list[int], start: int = 0) -> torch.Tensor:
    """Logits of every position from `start` on; the KV of those before is there already."""
    chunk = PrefillChunk(("t", 1), start, len(ids), tuple(ids[start:]), BLOCKS, samples=True)
    inputs = build_prefill([chunk], BLOCK, runner.device)
    return _run(runner, inputs, torch.arange(len(ids) - start))


def _decode(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """Logits after the last id, whose position alone is computed."""
    slot = DecodeSlot(("t", 1), len(ids) - 1, ids[-1], BLOCKS, slot=0)
    inputs = build_decode([slot], BLOCK, runner.device)
    return _run(runner, inputs, inputs.logit_rows)[0]


def _greedy(runner: ModelRunner, ids: list[int], count: int) -> list[int]:
    """`count` tokens after `ids`, by prefill and decode."""
    known = [*ids, int(_prefill(runner, ids)[-1].argmax())]
    while len(known) < len(ids) + count:
        known.append(int(_decode(runner, known).argmax()))
    return known[len(ids) :]


@pytest.mark.parametrize("prompt", [PARIS, LONGER])
def test_prefill_logits_equal_transformers(
    exact: ModelRunner, oracle: transformers.PreTrainedModel, tokenizer: Tokenizer, prompt: str
) -> None:
    ids = tokenizer.encode(prompt).ids
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    ours = _prefill(exact, ids)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-3)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_chunks_give_the_bits_of_the_whole(exact: ModelRunner, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(LONGER).ids
    whole = _prefill(exact, ids)
    first = _prefill(exact, ids[:11])
    rest = _prefill(exact, ids, start=11)
    assert torch.equal(torch.cat([first, rest]), whole)


def test_greedy_tokens_equal_transformers(
    exact: ModelRunner, oracle: transformers.PreTrainedModel, tokenizer: Tokenizer
) -> None:
    """Prefill, then decode. By induction one forward of the oracle over our tokens is enough:
    where each is the oracle's best after those before it, the oracle's own greedy text is ours.
    """
    ids = tokenizer.encode(PARIS).ids
    ours = _greedy(exact, ids, 6)
    with torch.inference_mode():
        best = oracle(torch.tensor([ids + ours])).logits[0].argmax(-1).tolist()
    assert ours == best[len(ids) - 1 : -1]
    assert tokenizer.decode(ours).startswith(" Paris")


def test_fast_numerics_say_paris_too(demo_folder: Path, tokenizer: Tokenizer) -> None:
    runner = _runner(demo_folder, "fast")
    text = tokenizer.decode(_greedy(runner, tokenizer.encode(PARIS).ids, 2))
    assert text.startswith(" Paris")
