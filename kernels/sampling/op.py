"""ops.sampling: what a row of logits becomes a token by, and how a device is told.

A Draw is one row's distribution and its point, an Edit what happens to its logits before. Both are
packed into a few bytes a row, so that a step sends one small copy and waits for nothing. The
definitions are engine_actor.model's (penalties, truncation, inverse_cdf, random_draw); the
references here say them once more, slowly.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

WEIGHT_ONE = 2.0**30
_DRAW = struct.Struct("<dQqfiii")
_EDIT = struct.Struct("<ffffiiiii")
_LARGEST_INT = 2**31 - 1
IN_PROMPT = 1 << 31
"""Bit of a count that says that the prompt holds the id."""


@dataclass(frozen=True, slots=True)
class Draw:
    """top_p, min_p, top_k: the truncation, off by default. seed, position: the point's key.
    greedy: take the largest instead.
    """

    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    position: int = 0
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class Edit:
    """temperature: 0 leaves the logits undivided. count_row: the row of the table of counts that
    belongs to the sequence, -1 for none. bias: id -> addend. banned: ids not allowed now.
    """

    temperature: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    count_row: int = -1
    bias: Mapping[int, float] = field(default_factory=dict)
    banned: Sequence[int] = ()


def pack_draws(draws: Sequence[Draw], rows: Sequence[int] | None = None) -> torch.Tensor:
    """u8[R, 40] on the host, the bytes of draw.cuh's Draw. rows: of the outcome, by default in
    order.
    """
    packed = bytearray()
    for draw, row in zip(draws, rows or range(len(draws)), strict=True):
        seed, top_k = draw.seed & (2**64 - 1), min(draw.top_k, _LARGEST_INT)
        packed += _DRAW.pack(draw.top_p, seed, draw.position, draw.min_p, top_k, draw.greedy, row)
    return torch.frombuffer(packed, dtype=torch.uint8).view(-1, _DRAW.size)


def pack_edits(
    edits: Sequence[Edit], rows: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """u8[R, 36], i32 ids and f32 biases on the host, the bytes of edit.cu's Edit and its lists.
    rows: of the logits, by default in order. Ids must fit in 31 bits.
    """
    packed = bytearray()
    ids: list[int] = []
    values: list[float] = []
    for edit, row in zip(edits, rows or range(len(edits)), strict=True):
        strengths = (edit.temperature, edit.repetition, edit.presence, edit.frequency)
        lists = (len(ids), len(edit.bias), len(edit.banned))
        packed += _EDIT.pack(*strengths, edit.count_row, *lists, row)
        ids += [*edit.bias, *edit.banned]
        values += [*edit.bias.values(), *(0.0 for _ in edit.banned)]
    return (
        torch.frombuffer(packed, dtype=torch.uint8).view(-1, _EDIT.size),
        torch.tensor(ids or [0], dtype=torch.int32),
        torch.tensor(values or [0.0], dtype=torch.float32),
    )


def draw_reference(probabilities: torch.Tensor, draw: Draw, point: float) -> int:
    """The token of one row fp32 [V] at `point` in [0, 1), by sorting and counting."""
    row = probabilities.cpu()
    if draw.greedy:
        return int(row.argmax())
    width = row.shape[0]
    ordered = row.sort(descending=True).values
    heavy = (ordered.double() * WEIGHT_ONE).long().cumsum(0).tolist()
    cutoff, total = 0.0, int(WEIGHT_ONE)
    if 0 < draw.top_k < width:
        cutoff, total = float(ordered[draw.top_k - 1]), heavy[draw.top_k - 1]
    if draw.top_p < 1.0:
        needed = max(1, math.ceil(total * draw.top_p))
        reached = next((i for i, weight in enumerate(heavy) if weight >= needed), width - 1)
        cutoff = max(cutoff, float(ordered[reached]))
    if draw.min_p > 0.0:
        cutoff = max(cutoff, float(ordered[0] * torch.tensor(draw.min_p, dtype=torch.float32)))
    weights = (row.double() * WEIGHT_ONE).long() * (row >= cutoff)
    passed = weights.cumsum(0)
    target = int(float(passed[-1]) * point)
    above = (passed > target).nonzero()
    return int(above[0]) if len(above) else width - 1
