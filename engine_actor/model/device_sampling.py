"""Sampling on a GPU: a batch's parameters go there in one copy, the kernels choose and tell the
host, which waits for nothing before it reads.

Same tokens as sampler.py's own way for the same probabilities. Knows rows and their parameters;
what a kernel does with them is kernels/sampling's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine_actor import ops
from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import SampledToken, TokenLogprobs
from engine_actor.core.sequence import Key
from engine_actor.model.logprobs import RowScores, score_rows
from engine_actor.model.penalties import SampleRow, is_edited, needs_history
from engine_actor.model.pending_sample import BrokenLogits, PendingSample

ROWS_AT_ONCE = 32
"""Rows that are edited or drawn together: each has 8 bytes of room for every id, and 4 more for a
while where penalties count its tokens."""
MOST_PACKED = 1024
"""Rows that are kept packed; they come again with every token of a sequence."""
SCORED_AT_ONCE = 16
"""Rows whose logprobs are taken together, through two copies of their logits."""


def sampler_bytes(rows: int, width: int) -> int:
    """Most device memory that sampling `rows` rows of `width` logits takes beside the logits."""
    at_once = min(rows, ROWS_AT_ONCE)
    counts, scores = 4 * at_once * width, 8 * min(rows, SCORED_AT_ONCE) * width
    return ops.sampler_room_bytes(at_once, width) + max(counts, scores)


def send(packed: bytes, device: torch.device) -> torch.Tensor:
    """u8 on the device, by a copy that the host does not wait for."""
    return ops.page_locked(device).send(torch.frombuffer(bytearray(packed), dtype=torch.uint8))


def send_numbers(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """i64 on the device, likewise."""
    return send(array("q", numbers).tobytes(), device).view(torch.int64)


def edit_of(row: SampleRow, width: int) -> ops.Edit:
    """Ids outside the vocabulary are passed over, as by penalties.edit(). Later entries of a bias
    win over earlier ones.
    """
    sampling = row.sampling
    temperature = 0.0 if sampling.greedy else sampling.temperature
    if not is_edited(row):
        return ops.Edit(temperature)
    prompt = row.prompt_ids if sampling.repetition_penalty != 1.0 else ()
    return ops.Edit(
        temperature,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        {token: bias for token, bias in dict(sampling.logit_bias).items() if 0 <= token < width},
        [token for token in row.banned if 0 <= token < width],
        (prompt, row.output_ids) if needs_history(row) else None,
    )


def draw_of(row: SampleRow, seed: int) -> ops.Draw:
    """seed: what the row's draws are keyed by."""
    sampling = row.sampling
    return ops.Draw(
        sampling.top_p, sampling.min_p, sampling.top_k, seed, row.position, sampling.greedy
    )


class _Coming:
    """A tensor's copy on its way to the host."""

    def __init__(self, there: torch.Tensor) -> None:
        self._lease = ops.page_locked(there.device).lease(there.numel() * there.element_size())
        self._here = self._lease.memory.view(there.dtype).view(there.shape)
        self._here.copy_(there, non_blocking=True)
        self._lease.note()

    def read(self) -> torch.Tensor:
        """To be called once the stream has come to the copy's end, and read at once."""
        return self._here


@dataclass(frozen=True, slots=True)
class _Scored:
    """Logprobs that some rows want, in parts: (rows of the batch, their scores on the way)."""

    parts: list[tuple[list[int], tuple[_Coming, _Coming, _Coming]]]
    tops: dict[int, int]

    def read(self, tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        found: dict[int, TokenLogprobs] = {}
        for rows, (chosen, values, ids) in self.parts:
            scores = RowScores(chosen.read(), values.read(), ids.read())
            entries = scores.entries([tokens[row] for row in rows])
            for row, entry in zip(rows, entries, strict=True):
                top = entry.top[: self.tops[row]]
                found[row] = TokenLogprobs(entry.token, entry.logprob, top)
        return found


class _Reply:
    """Where one batch of up to `rows` is told. Page-locked memory the kernels write themselves: a
    copy in the stream keeps the next step waiting.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.outcome = ops.new_outcome(rows, device)
        self.done = torch.Event(device=device)
        self.lease = ops.page_locked(device).lease(9 * rows)
        self._host = self.lease.memory
        self._tokens = self._host.numpy()[: 8 * rows].view("int64")
        self._finite = self._host.numpy()[8 * rows :]
        self.outcome.host = self._host if self._host.is_pinned() else None

    def start(self) -> None:
        """Behind all work on it."""
        if self.outcome.host is None:
            self._host.copy_(self.outcome.packed)
        self.done.record()

    def read(self, count: int) -> tuple[list[int], list[int]]:
        """Tokens and whether each is one, of the first `count` rows; waits."""
        self.done.synchronize()
        return self._tokens[:count].tolist(), self._finite[:count].tolist()


class _Pending:
    """A batch whose reply is on its way; `free` takes the reply back once it is read."""

    def __init__(
        self, keys: list[Key], reply: _Reply, scored: _Scored, free: Callable[[_Reply], None]
    ) -> None:
        self._keys = keys
        self._reply: _Reply | None = reply
        self._scored = scored
        self._free = free
        self._tokens: list[int] = []
        self._finite: list[int] = []

    def result(self) -> list[SampledToken]:
        """See PendingSample."""
        if self._reply is not None:
            self._tokens, self._finite = self._reply.read(len(self._keys))
            self._free(self._reply)
            self._reply = None
        if not all(self._finite):
            pairs = zip(self._keys, self._finite, strict=True)
            raise BrokenLogits(f"no finite logits for {[key for key, fine in pairs if not fine]}")
        scores = self._scored.read(self._tokens)
        return [
            SampledToken(key, token, scores.get(row))
            for row, (key, token) in enumerate(zip(self._keys, self._tokens, strict=True))
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
        self._replies: list[_Reply] = []
        self._packed: dict[Key, tuple[SamplingParams, bytes]] = {}

    def begin(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        token_buffer: torch.Tensor | None,
        slots: Sequence[int],
    ) -> PendingSample:
        """As Sampler.begin(), for at least one row of fp32 logits of this width and device."""
        reply = self._reply_for(len(rows))
        outcome = reply.outcome
        outcome.by_slot = token_buffer
        outcome.slots = None if token_buffer is None else self._places(slots)
        chosen = [i for i, row in enumerate(rows) if not row.sampling.greedy or is_edited(row)]
        try:
            if len(chosen) < len(rows):
                self._argmax_of(len(rows))(logits, outcome)
            if chosen:
                self._choose(self._room_for(len(chosen)), logits, rows, chosen, outcome)
        finally:
            reply.lease.note()  # what has been launched writes there, whatever failed behind it
        scored = self._score(logits, rows, outcome.tokens)
        reply.start()
        return _Pending([row.key for row in rows], reply, scored, self._replies.append)

    def _choose(
        self,
        room: ops.DeviceSampler,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        chosen: Sequence[int],
        outcome: ops.Outcome,
    ) -> None:
        """Edit and draw the chosen rows, as many at a time as the room has."""
        packer = ops.RowPacker(room.rows)
        for index in chosen:
            self._pack(packer, index, rows[index])
        sent = ops.Sent(send(packer.packed(), self.device), packer.biases_at, packer.ids_at)
        counts = None
        if packer.most_counted:
            shape = (packer.most_counted, self.width)
            counts = torch.empty(shape, dtype=torch.int32, device=self.device)
        for first in range(0, len(chosen), room.rows):
            count = min(room.rows, len(chosen) - first)
            if counts is not None:
                room.count(sent, first, count, counts.zero_())
            room.edit(logits, sent, first, count, counts)
            room.draw(sent, first, count, outcome)

    def _pack(self, packer: ops.RowPacker, index: int, row: SampleRow) -> None:
        """A row without edits differs from its last one in its position only."""
        params, packed = self._packed.get(row.key, (None, b""))
        if params is row.sampling and not row.banned:
            packer.add_again(packed, index, row.position)
            return
        seed = 0 if row.sampling.greedy else self._seed_of(row)
        packer.add(index, draw_of(row, seed), edit_of(row, self.width))
        if not is_edited(row):
            if len(self._packed) >= MOST_PACKED:
                self._packed.clear()
            self._packed[row.key] = row.sampling, packer.last()

    def _score(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], tokens: torch.Tensor
    ) -> _Scored:
        tops = {
            index: row.sampling.logprobs
            for index, row in enumerate(rows)
            if row.sampling.logprobs is not None
        }
        wanted = list(tops)
        parts: list[tuple[list[int], tuple[_Coming, _Coming, _Coming]]] = []
        for start in range(0, len(wanted), SCORED_AT_ONCE):
            part = wanted[start : start + SCORED_AT_ONCE]
            index = send_numbers(part, self.device)
            picked = logits.index_select(0, index)
            top = max(tops[row] for row in part)
            scores = score_rows(picked, tokens.index_select(0, index), top)
            parts.append(
                (part, (_Coming(scores.chosen), _Coming(scores.values), _Coming(scores.ids)))
            )
        return _Scored(parts, tops)

    def _places(self, slots: Sequence[int]) -> torch.Tensor:
        """slots i64 on the device; a batch that goes on keeps its own."""
        wanted = tuple(slots)
        if self._slots is None or self._slots[0] != wanted:
            self._slots = wanted, send_numbers(wanted, self.device)
        return self._slots[1]

    def _reply_for(self, rows: int) -> _Reply:
        """One that nobody waits for; those of works that failed are never given back."""
        for index, reply in enumerate(self._replies):
            if reply.rows >= rows:
                return self._replies.pop(index)
        return _Reply(_rounded_up(rows), self.device)

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
