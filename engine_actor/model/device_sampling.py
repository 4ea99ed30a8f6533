"""Sampling on a GPU: a batch's parameters go there in one copy, the kernels choose, one copy comes
back; the host waits for nothing before it reads.

Same tokens as sampler.py's own way for the same probabilities. Knows rows and their parameters;
what a kernel does with them is kernels/sampling's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_actor import ops
from engine_actor.core.plan import SampledToken, TokenLogprobs
from engine_actor.core.sequence import Key
from engine_actor.model.logprobs import RowScores, score_rows
from engine_actor.model.penalties import SampleRow, is_edited, needs_history
from engine_actor.model.pending_sample import BrokenLogits, PendingSample

ROWS_AT_ONCE = 32
"""Rows that are edited or drawn together: each has 8 bytes of room for every id, and 4 more for a
while where penalties count its tokens."""
SCORED_AT_ONCE = 16
"""Rows whose logprobs are taken together, through two copies of their logits."""


def sampler_bytes(rows: int, width: int) -> int:
    """Most device memory that sampling `rows` rows of `width` logits takes beside the logits."""
    at_once = min(rows, ROWS_AT_ONCE)
    counts, scores = 4 * at_once * width, 8 * min(rows, SCORED_AT_ONCE) * width
    return ops.sampler_room_bytes(at_once, width) + max(counts, scores)


def send(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The same tensors on the device, by one copy that the host does not wait for. They begin at
    multiples of 16 bytes.
    """
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + -(-part.nbytes // 16) * 16)
    staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = staged.numpy().data
    for start, part in zip(starts, parts, strict=False):
        memory[start : start + part.nbytes] = part.numpy().tobytes()
    there = staged.to(device, non_blocking=True)
    return [
        there[start : start + part.nbytes].view(part.dtype).view(part.shape)
        for start, part in zip(starts, parts, strict=False)
    ]


def edit_of(row: SampleRow, count_row: int, width: int) -> ops.Edit:
    """Ids outside the vocabulary are passed over, as by penalties.edit(). Later entries of a bias
    win over earlier ones.
    """
    sampling = row.sampling
    return ops.Edit(
        0.0 if sampling.greedy else sampling.temperature,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        count_row,
        {token: bias for token, bias in dict(sampling.logit_bias).items() if 0 <= token < width},
        [token for token in row.banned if 0 <= token < width],
    )


def draw_of(row: SampleRow, seed: int) -> ops.Draw:
    """seed: what the row's draws are keyed by."""
    sampling = row.sampling
    return ops.Draw(
        sampling.top_p, sampling.min_p, sampling.top_k, seed, row.position, sampling.greedy
    )


def history_of(rows: Sequence[SampleRow], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the ids of prompts and outputs stand in a table of counts [len(rows), width], i64."""

    def places(histories: Sequence[Sequence[int]]) -> torch.Tensor:
        found = [np.zeros(0, dtype=np.int64)]
        for index, history in enumerate(histories):
            ids = np.asarray(history, dtype=np.int64)
            found.append(ids[(ids >= 0) & (ids < width)] + index * width)
        return torch.from_numpy(np.concatenate(found))

    prompts = [row.prompt_ids if row.sampling.repetition_penalty != 1.0 else () for row in rows]
    return places(prompts), places([row.output_ids for row in rows])


def count_history(
    prompts: torch.Tensor, outputs: torch.Tensor, rows: int, width: int
) -> torch.Tensor:
    """The table as edit.cu reads it, i32 [rows, width], from history_of() on the device."""
    counts = torch.zeros(rows * width, dtype=torch.int32, device=prompts.device)
    counts.index_fill_(0, prompts, -(2**31))
    ones = torch.ones(1, dtype=torch.int32, device=prompts.device)
    return counts.index_add_(0, outputs, ones.expand(outputs.shape)).view(rows, width)


@dataclass(frozen=True, slots=True)
class _Scored:
    """Logprobs that some rows want, in parts: (rows of the batch, their scores on the host)."""

    parts: list[tuple[list[int], RowScores]]
    tops: dict[int, int]

    def read(self, tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        found: dict[int, TokenLogprobs] = {}
        for rows, scores in self.parts:
            entries = scores.entries([tokens[row] for row in rows])
            for row, entry in zip(rows, entries, strict=True):
                top = entry.top[: self.tops[row]]
                found[row] = TokenLogprobs(entry.token, entry.logprob, top)
        return found


@dataclass(frozen=True, slots=True)
class _Pending:
    """On its way to the host until `done`."""

    keys: list[Key]
    packed: torch.Tensor
    scored: _Scored
    done: torch.Event

    def result(self) -> list[SampledToken]:
        """See PendingSample."""
        self.done.synchronize()
        split = 8 * len(self.keys)
        finite = self.packed[split:].tolist()
        if not all(finite):
            broken = [key for key, fine in zip(self.keys, finite, strict=True) if not fine]
            raise BrokenLogits(f"no finite logits for {broken}")
        tokens = self.packed[:split].view(torch.int64).tolist()
        scores = self.scored.read(tokens)
        return [
            SampledToken(key, token, scores.get(row))
            for row, (key, token) in enumerate(zip(self.keys, tokens, strict=True))
        ]


class DeviceSampling:
    """Belongs to one stream. seed_of: what a row's draws are keyed by."""

    def __init__(
        self, device: torch.device, width: int, seed_of: Callable[[SampleRow], int]
    ) -> None:
        self.device = device
        self.width = width
        self._seed_of = seed_of
        self._argmax: ops.DeviceArgmax | None = None
        self._room: ops.DeviceSampler | None = None
        self._most_rows = ROWS_AT_ONCE
        self._slots: tuple[tuple[int, ...], torch.Tensor] | None = None

    def begin(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        token_buffer: torch.Tensor | None,
        slots: Sequence[int],
    ) -> PendingSample:
        """As Sampler.begin(), for at least one row of fp32 logits of this width and device."""
        places = None if token_buffer is None else self._places(slots)
        outcome = ops.new_outcome(len(rows), self.device, token_buffer, places)
        chosen = [i for i, row in enumerate(rows) if not row.sampling.greedy or is_edited(row)]
        if len(chosen) < len(rows):
            self._argmax_of(len(rows))(logits, outcome)
        if chosen:
            room = self._room_for(len(chosen))
            for start in range(0, len(chosen), room.rows):
                self._choose(room, logits, rows, chosen[start : start + room.rows], outcome)
        scored = self._score(logits, rows, outcome.tokens)
        packed = _to_host(outcome.packed)
        done = torch.Event(device=self.device)
        done.record()
        return _Pending([row.key for row in rows], packed, scored, done)

    def _choose(
        self,
        room: ops.DeviceSampler,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        part: list[int],
        outcome: ops.Outcome,
    ) -> None:
        """Edit and draw the rows of `part`, at most as many as the room has."""
        chosen = [rows[index] for index in part]
        counted = [row for row in chosen if needs_history(row)]
        count_rows = iter(range(len(counted)))
        edits = [
            edit_of(row, next(count_rows) if needs_history(row) else -1, self.width)
            for row in chosen
        ]
        draws = [draw_of(row, 0 if row.sampling.greedy else self._seed_of(row)) for row in chosen]
        host = [*ops.pack_edits(edits, part), ops.pack_draws(draws, part)]
        if counted:
            host += history_of(counted, self.width)
        packed, ids, values, points, *history = send(host, self.device)
        counts = count_history(*history, len(counted), self.width) if counted else None
        room.edit(logits, packed, ids, values, counts)
        room.draw(points, outcome)

    def _score(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], tokens: torch.Tensor
    ) -> _Scored:
        tops = {
            index: row.sampling.logprobs
            for index, row in enumerate(rows)
            if row.sampling.logprobs is not None
        }
        wanted = list(tops)
        parts: list[tuple[list[int], RowScores]] = []
        for start in range(0, len(wanted), SCORED_AT_ONCE):
            part = wanted[start : start + SCORED_AT_ONCE]
            (index,) = send([torch.tensor(part)], self.device)
            picked = logits.index_select(0, index)
            top = max(tops[row] for row in part)
            scores = score_rows(picked, tokens.index_select(0, index), top)
            there = (_to_host(scores.chosen), _to_host(scores.values), _to_host(scores.ids))
            parts.append((part, RowScores(*there)))
        return _Scored(parts, tops)

    def _places(self, slots: Sequence[int]) -> torch.Tensor:
        """slots i64 on the device; a batch that goes on keeps its own."""
        wanted = tuple(slots)
        if self._slots is None or self._slots[0] != wanted:
            (there,) = send([torch.tensor(wanted, dtype=torch.int64)], self.device)
            self._slots = wanted, there
        return self._slots[1]

    def _argmax_of(self, rows: int) -> ops.DeviceArgmax:
        if self._argmax is None or self._argmax.rows < rows:
            self._argmax = ops.DeviceArgmax(_rounded_up(rows), self.device)
        return self._argmax

    def _room_for(self, rows: int) -> ops.DeviceSampler:
        """For all of them, or for a part at a time. Raises torch.OutOfMemoryError."""
        wanted = min(_rounded_up(rows), self._most_rows)
        if self._room is None or self._room.rows < wanted:
            try:
                self._room = ops.DeviceSampler(wanted, self.width, self.device)
            except torch.OutOfMemoryError:
                if self._room is None:
                    raise
                self._most_rows = self._room.rows
        return self._room


def _rounded_up(rows: int) -> int:
    """To a power of two: growing is rare."""
    return 1 << (rows - 1).bit_length()


def _to_host(there: torch.Tensor) -> torch.Tensor:
    """Page-locked; there once the stream has come to the copy's end."""
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
    return here.copy_(there, non_blocking=True)
