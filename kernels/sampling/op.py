"""ops.sampling: what a row of logits becomes a token by, and how a device is told.

A Draw is one row's distribution and its point, an Edit what happens to its logits before. Both are
packed into some bytes a row, so that a step sends one small copy and waits for nothing. The
definitions are engine_actor.model's (penalties, truncation, inverse_cdf, random_draw); the
references here say them once more, slowly.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

WEIGHT_ONE = 2.0**30
ROW = struct.Struct("<dQqfiiiffffiiiiiiii")
BIAS = struct.Struct("<if")
_POSITION, _POSITION_AT = struct.Struct("<q"), struct.calcsize("<dQ")
_PLACE, _PLACE_AT = struct.Struct("<i"), struct.calcsize("<dQqfii")
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
    """temperature: 0 leaves the logits undivided. bias: id -> addend. banned: ids not allowed now.
    history: the ids of prompt and output, where a penalty counts them.
    """

    temperature: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    banned: Sequence[int] = ()
    history: tuple[Sequence[int], Sequence[int]] | None = None


class RowPacker:
    """Rows for the kernels, as bytes: one of draw.cuh's Row for each, then all biases, then all
    ids. at_once: rows that the kernels take together; the counted ones among them share a table.
    """

    def __init__(self, at_once: int) -> None:
        self.most_counted = 0
        self._at_once = at_once
        self._counted = 0
        self._n_rows = 0
        self._rows = bytearray()
        self._biases = bytearray()
        self._ids = array("i")

    def add(self, row: int, draw: Draw, edit: Edit) -> None:
        """`row` of the batch. Raises OverflowError for ids beyond 31 bits."""
        self._begin_row()
        count_row, first_id, prompts, outputs = -1, len(self._ids), 0, 0
        if edit.history is not None:
            prompts, outputs = map(len, edit.history)
            for ids in edit.history:
                self._ids += array("i", ids)
            count_row = self._counted
            self._counted += 1
            self.most_counted = max(self.most_counted, self._counted)
        first_bias = len(self._biases) // BIAS.size
        for token, value in edit.bias.items():
            self._biases += BIAS.pack(token, value)
        for token in edit.banned:
            self._biases += BIAS.pack(token, 0.0)
        self._rows += ROW.pack(
            draw.top_p,
            draw.seed & (2**64 - 1),
            draw.position,
            draw.min_p,
            min(draw.top_k, _LARGEST_INT),
            draw.greedy,
            row,
            edit.temperature,
            edit.repetition,
            edit.presence,
            edit.frequency,
            count_row,
            first_bias,
            len(edit.bias),
            len(edit.banned),
            first_id,
            prompts,
            outputs,
            0,
        )

    def add_again(self, packed: bytes, row: int, position: int) -> None:
        """What last() gave of a row without edits, elsewhere in a batch and at another position."""
        self._begin_row()
        at = len(self._rows)
        self._rows += packed
        _POSITION.pack_into(self._rows, at + _POSITION_AT, position)
        _PLACE.pack_into(self._rows, at + _PLACE_AT, row)

    def last(self) -> bytes:
        """The row added last."""
        return bytes(self._rows[-ROW.size :])

    def _begin_row(self) -> None:
        if self._n_rows % self._at_once == 0:
            self._counted = 0
        self._n_rows += 1

    @property
    def biases_at(self) -> int:
        """Where the biases begin, in bytes."""
        return len(self._rows)

    @property
    def ids_at(self) -> int:
        """Where the ids begin, in bytes."""
        return len(self._rows) + len(self._biases)

    def packed(self) -> bytes:
        """What is to be sent."""
        return bytes(self._rows) + bytes(self._biases) + self._ids.tobytes()


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
