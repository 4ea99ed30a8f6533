"""Prompts of thousands of rows on the GPU: other kernels, an MLP in parts, the same logits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine_actor.core.plan import PrefillChunk
from engine_actor.load.tiny import write_tiny
from engine_actor.model.decoder import MLP_ROWS
from engine_actor.model.layer_ops import CUDA_ATTENTION
from engine_actor.work.inputs import build_prefill
from tests.engine.real_engine import BLOCK, Loaded, load

pytestmark = pytest.mark.gpu
LENGTHS = (2600, 1040, 1040, 70)
CHUNK = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    shape: dict[str, Any] = {"head_dim": 64, "dtype": "float16", "hidden_size": 128}
    shape["max_position_embeddings"] = 4096
    folder = write_tiny(tmp_path_factory.mktemp("long"), "llama", seed=3, packed=True, **shape)
    loaded = load(folder, "fast", "cuda")
    assert loaded.runner.op_set.attention is CUDA_ATTENTION
    loaded.runner.warm_thread(max(LENGTHS))
    return loaded


def chunks(tokens: list[tuple[int, ...]], start: int, end: int) -> list[PrefillChunk]:
    """Positions start..end-1 of each, in scattered blocks; every one's last row is wanted."""
    order = list(range(sum(-(-length // BLOCK) for length in LENGTHS)))
    random.Random(2).shuffle(order)
    found = []
    for index, ids in enumerate(tokens):
        blocks = tuple(order.pop() for _ in range(-(-len(ids) // BLOCK)))
        stop = min(end, len(ids))
        if start < stop:
            covered = blocks[: -(-stop // BLOCK)]
            key = ("c", index)
            found.append(PrefillChunk(key, start, stop, ids[start:stop], covered, stop == len(ids)))
    return found


def test_whole_prompts_have_the_logits_of_chunks(model: Loaded) -> None:
    """Logits have a deviation of 8; half precision moves them by some hundredths."""
    runner, draw = model.runner, random.Random(3)
    assert sum(LENGTHS) > MLP_ROWS
    tokens = [tuple(draw.randrange(3, 270) for _ in range(length)) for length in LENGTHS]
    runner.resize_kv(sum(-(-length // BLOCK) for length in LENGTHS))
    inputs = build_prefill(chunks(tokens, 0, max(LENGTHS)), BLOCK, runner.device)
    whole = runner.last_logits(runner.embed(inputs), inputs, 0)
    assert whole is not None
    pieces: dict[int, torch.Tensor] = {}
    for start in range(0, max(LENGTHS), CHUNK):
        part = chunks(tokens, start, start + CHUNK)
        inputs = build_prefill(part, BLOCK, runner.device)
        logits = runner.last_logits(runner.embed(inputs), inputs, 0)
        for row, chunk in enumerate(chunk for chunk in part if chunk.samples):
            assert logits is not None
            pieces[chunk.key[1]] = logits[row]
    got = torch.stack([pieces[index] for index in range(len(LENGTHS))])
    assert (whole - got).abs().max() < 0.2
