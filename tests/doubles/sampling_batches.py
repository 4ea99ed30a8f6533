"""Random batches of rows to sample, of every kind that a request can ask for."""

from __future__ import annotations

import random

import torch

from engine_actor.core.params import SamplingParams
from engine_actor.model.penalties import SampleRow

SPREADS = (0.0, 0.5, 3.0, 12.0)


def random_params(draw: random.Random, width: int) -> SamplingParams:
    """Half of them plain greedy ones; biases may name an id twice or one that is not there."""
    if draw.random() < 0.5:
        return SamplingParams(temperature=0.0, logprobs=draw.choice([None, None, None, 0, 3]))
    ids = [draw.randrange(width + 2) for _ in range(draw.choice([0, 0, 5]))]
    return SamplingParams(
        temperature=draw.choice([0.0, 0.3, 0.7, 1.0, 2.0]),
        top_p=draw.choice([1.0, 1.0, 0.95, 0.5, 1e-6]),
        top_k=draw.choice([0, 0, 1, 20, 3000, 10**12]),
        min_p=draw.choice([0.0, 0.0, 0.1, 1.0]),
        presence_penalty=draw.choice([0.0, 0.0, 0.7, -2.0]),
        frequency_penalty=draw.choice([0.0, 0.0, 0.3]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3, 0.5]),
        logit_bias=tuple((token, draw.uniform(-50, 50)) for token in ids),
        seed=draw.choice([None, draw.randrange(-(2**63), 2**63)]),
        logprobs=draw.choice([None, None, 0, 5, 20]),
    )


def random_row(draw: random.Random, width: int, rid: int) -> SampleRow:
    """With a history of its own, and bans now and then."""
    prompt = [draw.randrange(width) for _ in range(draw.choice([1, 30, 300]))]
    output = [draw.randrange(min(width, 100)) for _ in range(draw.choice([0, 4, 100]))]
    banned = [draw.randrange(width) for _ in range(draw.choice([0, 0, 0, 3]))]
    params = random_params(draw, width)
    return SampleRow(("client", rid), params, prompt, output, len(prompt) + len(output), banned)


def random_logits(draw: random.Random, rows: int, width: int) -> torch.Tensor:
    """fp32 [rows, width] on the CPU: flat, peaked, with ties and with minus infinities."""
    torch.manual_seed(draw.randrange(2**32))
    spreads = torch.tensor([draw.choice(SPREADS) for _ in range(rows)])
    logits = torch.randn(rows, width) * spreads[:, None]
    for row in range(rows):
        if draw.random() < 0.3:
            logits[row] = logits[row].round()
        if draw.random() < 0.1:
            logits[row, torch.rand(width) < 0.9] = -torch.inf
            logits[row, -1] = 1.0
    return logits


def random_batch(seed: int, rows: int, width: int) -> tuple[torch.Tensor, list[SampleRow]]:
    """Logits and what is asked of them."""
    draw = random.Random(seed)
    return random_logits(draw, rows, width), [random_row(draw, width, i) for i in range(rows)]
