"""Batches of prompts for the graphs of their forwards, and models that run them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine_actor.core.plan import PrefillChunk
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.runner import ModelRunner, build_runner
from engine_actor.work.inputs import build_prefill
from tests.engine.real_engine import BLOCK

MOST, BURST, CONTEXT = 512, 2048, 1500
EACH = -(-CONTEXT // BLOCK)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"dtype": "float16"},
    "qwen2": {"dtype": "bfloat16"},
    "mistral": {"dtype": "float16", "sliding_window": 50},
}


class Unrecorded:
    """A capture whose replay launches everything anew."""

    nbytes = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


def runner_of(folder: Path, kv_dtype: str = "auto") -> ModelRunner:
    opened = open_checkpoint(folder)
    return build_runner(
        opened.config, opened.weights(), device="cuda", kv_dtype=kv_dtype, block_tokens=BLOCK
    )


def chunk(key: int, start: int, end: int, wanted: bool = True) -> PrefillChunk:
    """Of sequence `key`, whose tokens are its own and whose blocks lie backwards."""
    draw = random.Random(key)
    tokens = tuple(draw.randrange(3, 270) for _ in range(end))[start:]
    blocks = tuple(range(key * EACH + EACH - 1, key * EACH - 1, -1))[: -(-end // BLOCK)]
    return PrefillChunk(("c", key), start, end, tokens, blocks, wanted)


def inputs_of(runner: ModelRunner, chunks: list[PrefillChunk]) -> BatchInputs:
    return build_prefill(chunks, BLOCK, runner.device)


BATCHES = {
    "one": [chunk(0, 0, 30)],
    "a whole bucket": [chunk(0, 0, 64)],
    "of another length": [chunk(1, 0, 41)],
    "cached keys": [chunk(1, 41, 90)],
    "many cached keys": [chunk(2, 0, 500), chunk(1, 90, 91)],
    "the longest": [chunk(2, 500, 1000, wanted=False)],
    "beyond the fewest keys": [chunk(2, 1000, 1200)],
    "three, the last unfinished": [chunk(3, 0, 7), chunk(4, 0, 90), chunk(5, 0, 33, wanted=False)],
    "the second wanted": [chunk(6, 0, 20, wanted=False), chunk(7, 0, 21)],
    "nobody": [chunk(6, 20, 40, wanted=False)],
    "all places": [chunk(8 + i, 0, 3 + i) for i in range(8)],
    "no room": [chunk(0, 0, 520)],
}
BURSTS = {
    "four alike": [chunk(i, 0, 512) for i in range(4)],
    "ragged": [chunk(4, 0, 700), chunk(5, 0, 33), chunk(6, 0, 501)],
    "cached keys": [chunk(0, 512, 1000), chunk(1, 512, 900, wanted=False), chunk(2, 512, 530)],
    "a whole bucket": [chunk(3, 512, 1280)],
    "of the same bucket": [chunk(7, 0, 513)],
    "the first of it unfinished": [chunk(9, 0, 260, wanted=False), chunk(10, 0, 262)],
    "all places": [chunk(8 + i, 0, 200 + i) for i in range(8)],
    "a small one between": [chunk(15, 0, 90)],
    "too long for one": [chunk(0, 0, 1024)],
    "no room": [chunk(i, 0, 520) for i in range(4)],
}


def run_all(
    runner: ModelRunner, times: int = 3, batches: dict[str, list[PrefillChunk]] = BATCHES
) -> dict[str, list[torch.Tensor]]:
    """Each batch some times in a row: by its launches, then replayed."""
    made: dict[str, list[torch.Tensor]] = {}
    for name, chunks in batches.items():
        inputs = inputs_of(runner, chunks)
        for _ in range(times):
            logits = runner.prefill_logits(inputs)
            assert (logits is None) == (not any(each.samples for each in chunks)), name
            if logits is not None:
                made.setdefault(name, []).append(logits.clone())
    return made
