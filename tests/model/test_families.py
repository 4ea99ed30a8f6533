"""Logits equal transformers' on tiny random checkpoints of each family (S-23).

Whole prompts, chunks, decode and mixed batches, through paged KV in shuffled blocks.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from engine_actor.model.runner import ModelRunner
from tests.model.tiny_models import BLOCK, FAMILIES, Part, batch, forward, oracle, runner_for

TOLERANCE = 1e-4
LENGTH = 26


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def reference(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [3, LENGTH], logits [3, LENGTH, vocab]) by transformers, eager attention, fp32."""
    ids = torch.randint(0, 97, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        return ids, oracle(family)(ids).logits


@pytest.fixture(params=["fast", "exact"])
def runner(family: str, request: pytest.FixtureRequest) -> ModelRunner:
    """A runner over the same weights with an empty cache."""
    return runner_for(oracle(family), request.param)


def scattered(count: int, seed: int = 0) -> list[list[int]]:
    """Blocks for `count` sequences of LENGTH tokens, in no order at all."""
    each = -(-LENGTH // BLOCK)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[i * each : (i + 1) * each] for i in range(count)]


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Close, and the same greedy token."""
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < TOLERANCE
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_whole_prompt(runner: ModelRunner, reference: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Every row of one prefill."""
    ids, logits = reference
    inputs = batch([Part(ids[0].tolist(), 0, scattered(1)[0])])
    assert_same(forward(runner, inputs, torch.arange(LENGTH)), logits[0])


def test_consecutive_blocks(
    runner: ModelRunner, reference: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Keys read as a slice of the cache, not gathered."""
    ids, logits = reference
    blocks = list(range(5, 5 + -(-LENGTH // BLOCK)))
    forward(runner, batch([Part(ids[0, :-1].tolist(), 0, blocks)]))
    last = forward(runner, batch([Part(ids[0, -1:].tolist(), LENGTH - 1, blocks)]))
    assert_same(last[0], logits[0, -1])


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_chunks_then_decode(
    runner: ModelRunner, reference: tuple[torch.Tensor, torch.Tensor], chunk: int
) -> None:
    """A prompt in chunks of any size, then token by token (S-43)."""
    ids, logits = reference
    blocks = scattered(1, seed=chunk)[0]
    bounds = [*range(0, LENGTH - 4, chunk), *range(LENGTH - 4, LENGTH + 1)]
    for start, end in pairwise(bounds):
        inputs = batch([Part(ids[0, start:end].tolist(), start, blocks)])
        assert_same(forward(runner, inputs, torch.arange(end - start)), logits[0, start:end])


def test_mixed_batch(runner: ModelRunner, reference: tuple[torch.Tensor, torch.Tensor]) -> None:
    """One decodes, one is in the middle of its prompt, one begins: one forward."""
    ids, logits = reference
    one, two, three = scattered(3)
    forward(runner, batch([Part(ids[0, :20].tolist(), 0, one), Part(ids[1, :9].tolist(), 0, two)]))
    parts = [
        Part(ids[1, 9:15].tolist(), 9, two),
        Part(ids[0, 20:21].tolist(), 20, one),
        Part(ids[2, :11].tolist(), 0, three),
    ]
    want = torch.cat((logits[1, 9:15], logits[0, 20:21], logits[2, :11]))
    assert_same(forward(runner, batch(parts), torch.arange(18)), want)


def test_batched_decode(runner: ModelRunner, reference: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Streams at different positions side by side (S-44)."""
    ids, logits = reference
    starts, blocks = (5, 19, 12), scattered(3)
    prompts = [Part(ids[i, :n].tolist(), 0, blocks[i]) for i, n in enumerate(starts)]
    forward(runner, batch(prompts))
    for step in range(6):
        at = [n + step for n in starts]
        parts = [Part([int(ids[i, p])], p, blocks[i]) for i, p in enumerate(at)]
        assert_same(forward(runner, batch(parts)), logits[torch.arange(3), torch.tensor(at)])


def test_layer_ranges(runner: ModelRunner, reference: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A prefill in layer ranges with a decode in between; and a repeated range changes nothing."""
    ids, logits = reference
    one, two = scattered(2)
    forward(runner, batch([Part(ids[0, :10].tolist(), 0, one)]))
    prefill = batch([Part(ids[1].tolist(), 0, two)])
    decode = batch([Part(ids[0, 10:11].tolist(), 10, one)])
    begun = runner.embed(prefill)
    hidden = runner.run_layers(begun, prefill, 0, 1)
    assert_same(forward(runner, decode)[0], logits[0, 10])
    before = runner.kv_checksum(tuple(two))
    again = runner.run_layers(begun, prefill, 0, 1)
    assert torch.equal(again, hidden)
    assert runner.kv_checksum(tuple(two)) == before
    hidden = runner.run_layers(again, prefill, 1, runner.n_layers)
    assert_same(runner.logits(hidden, torch.arange(LENGTH)), logits[1])


def test_cache_grows_and_shrinks_in_use(
    runner: ModelRunner, reference: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """The content of blocks that stay is kept."""
    ids, logits = reference
    blocks = list(range(-(-LENGTH // BLOCK)))
    forward(runner, batch([Part(ids[0, :12].tolist(), 0, blocks)]))
    runner.resize_kv(100)
    forward(runner, batch([Part(ids[0, 12:20].tolist(), 12, blocks)]))
    runner.resize_kv(len(blocks))
    inputs = batch([Part(ids[0, 20:].tolist(), 20, blocks)])
    assert_same(forward(runner, inputs, torch.arange(6)), logits[0, 20:])
