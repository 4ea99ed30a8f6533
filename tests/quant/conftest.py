"""One thread, and tiny checkpoints with random token rows."""

from __future__ import annotations

import pytest
import torch

from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import write_tiny
from engine_actor.quant.convert import Job
from engine_actor.quant.recipe import Method, fixed_recipe
from engine_actor.quant.texts import TokenRows


def token_rows(count: int, length: int, seed: int) -> TokenRows:
    """Random ids of the tiny tokenizer."""
    draw = torch.Generator().manual_seed(seed)
    return TokenRows(f"random {seed}", torch.randint(0, 275, (count, length), generator=draw))


@pytest.fixture
def make_job(tmp_path):
    """A function: a tiny checkpoint of a family -> a job on it."""

    def make(family="llama", recipe="w4", group=32, method=None, offsets=False, **tiny) -> Job:
        folder = tmp_path / f"source-{family}"
        write_tiny(folder, family, **tiny)
        chosen = fixed_recipe(recipe, group, offsets, method or Method())
        return Job(
            open_checkpoint(folder),
            "tiny",
            chosen,
            token_rows(6, 64, 1),
            token_rows(3, 64, 2),
            torch.device("cpu"),
        )

    return make
