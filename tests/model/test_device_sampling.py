"""What the host does for sampling on a GPU: what it packs, in which parts, and what it reads back.

The kernels are played by doubles that read the packed bytes and choose by the slow definitions."""

from __future__ import annotations

import random
import struct
from typing import Any, ClassVar

import pytest
import torch

from engine_actor import ops
from engine_actor.core.params import SamplingParams
from engine_actor.model import device_sampling
from engine_actor.model.device_sampling import (
    DeviceSampling,
    sampler_bytes,
)
from engine_actor.model.penalties import SampleRow
from engine_actor.model.random_draw import uniform
from engine_actor.model.sampler import BrokenLogits, Sampler
from kernels.sampling.op import BIAS, IN_PROMPT, ROW, Draw, draw_reference
from tests.doubles.sampling_batches import random_batch

CPU = torch.device("cpu")
SEED = 11


def _tell(outcome: ops.Outcome, row: int, values: torch.Tensor) -> None:
    token = int(values.argmax())
    outcome.tokens[row] = token
    outcome.finite[row] = bool(values[token].isfinite())


class Argmax:
    """Plays DeviceArgmax."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows

    def __call__(self, logits: torch.Tensor, outcome: ops.Outcome) -> None:
        assert logits.shape[0] <= self.rows
        for row, values in enumerate(logits):
            _tell(outcome, row, values)
        _by_slot(outcome, range(len(logits)))


class Room:
    """Plays DeviceSampler."""

    made: ClassVar[list[int]] = []
    most: ClassVar[int] = 10**9

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        if rows > Room.most:
            raise torch.OutOfMemoryError(f"no room for {rows} rows")
        Room.made.append(rows)
        self.rows = rows
        self.width = width

    def count(self, sent: ops.Sent, first: int, rows: int, counts: torch.Tensor) -> None:
        """Of the rows that have a table."""
        assert not counts.any()
        packed = sent.packed.numpy().tobytes()
        for asked in _rows_of(packed, first, rows):
            count_row, (first_id, prompts, outputs) = asked[11], asked[15:18]
            ids = struct.unpack_from(f"<{prompts + outputs}i", packed, sent.ids_at + 4 * first_id)
            for token in set(ids[:prompts]) & set(range(self.width)):
                counts[count_row, token] |= -(2**31)
            for token in ids[prompts:]:
                counts[count_row, token] += 1

    def edit(
        self,
        logits: torch.Tensor,
        sent: ops.Sent,
        first: int,
        rows: int,
        counts: torch.Tensor | None,
    ) -> None:
        """One row at a time, from its bytes."""
        assert rows <= self.rows
        self.edited = []
        packed = sent.packed.numpy().tobytes()
        for asked in _rows_of(packed, first, rows):
            temperature, repetition, presence, frequency = asked[7:11]
            count_row, first_bias, biases, bans = asked[11:15]
            edited = logits[asked[6]].clone()
            at = sent.biases_at + BIAS.size * first_bias
            entries = list(BIAS.iter_unpack(packed[at : at + BIAS.size * (biases + bans)]))
            for token, value in entries[:biases]:
                edited[token] += value
            if count_row >= 0:
                assert counts is not None
                seen = counts[count_row].view(torch.uint32).long()
                times = seen & (IN_PROMPT - 1)
                if repetition != 1.0:
                    scaled = torch.where(edited > 0, edited / repetition, edited * repetition)
                    edited = torch.where(seen > 0, scaled.clamp(max=1e30), edited)
                cost = times * torch.tensor(frequency) + torch.tensor(presence)
                edited = torch.where(times > 0, edited - cost, edited)
            for token, _ in entries[biases:]:
                edited[token] = -torch.inf
            self.edited.append(edited / temperature if temperature > 0 else edited)

    def draw(self, sent: ops.Sent, first: int, rows: int, outcome: ops.Outcome) -> None:
        """One row at a time."""
        packed = sent.packed.numpy().tobytes()
        for edited, asked in zip(self.edited, _rows_of(packed, first, rows), strict=True):
            top_p, seed, position, min_p, top_k, greedy, row = asked[:7]
            if greedy:
                _tell(outcome, row, edited)
            else:
                probabilities = torch.softmax(edited, -1)
                draw = Draw(top_p, min_p, top_k, seed, position)
                outcome.finite[row] = bool(probabilities[0].isfinite())
                outcome.tokens[row] = draw_reference(probabilities, draw, uniform(seed, position))
            _by_slot(outcome, [row])


def _rows_of(packed: bytes, first: int, rows: int) -> list[tuple[Any, ...]]:
    return [ROW.unpack_from(packed, ROW.size * (first + index)) for index in range(rows)]


def _by_slot(outcome: ops.Outcome, rows) -> None:  # type: ignore[no-untyped-def]
    if outcome.by_slot is not None and outcome.slots is not None:
        for row in rows:
            outcome.by_slot[outcome.slots[row]] = outcome.tokens[row]


class Event:
    """Plays torch.Event."""

    def __init__(self, device: torch.device) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kernels' place."""
    monkeypatch.setattr(ops, "DeviceArgmax", Argmax)
    monkeypatch.setattr(ops, "DeviceSampler", Room)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Room, "made", [])
    monkeypatch.setattr(Room, "most", 10**9)


def _sampling(width: int) -> DeviceSampling:
    return DeviceSampling(CPU, width, Sampler(base_seed=SEED)._seed_of)


def _before(row: SampleRow) -> SampleRow:
    """The same sequence one token earlier, where nothing is banned."""
    return SampleRow(row.key, row.sampling, row.prompt_ids, row.output_ids, row.position - 1)


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_batch_is_the_samplers(rows: int) -> None:
    """Tokens, logprobs and the token buffer, in as many parts as it takes, step after step."""
    for seed in range(4):
        width = 60
        logits, asked = random_batch(seed, rows, width)
        tokens, slots = (
            torch.full((2 * rows,), -1),
            random.Random(seed).sample(range(2 * rows), rows),
        )
        sampling = _sampling(width)
        sampling.begin(logits, [_before(row) for row in asked], None, ()).result()
        made = sampling.begin(logits, asked, tokens, slots).result()
        assert made == Sampler(base_seed=SEED).sample(logits, asked)
        assert tokens[slots].tolist() == [one.token for one in made]
        assert int((tokens == -1).sum()) == rows
        assert max(Room.made, default=0) <= device_sampling.ROWS_AT_ONCE


def test_plain_greedy_rows_take_no_room() -> None:
    """One argmax, whatever stands beside them."""
    row = SampleRow(("c", 0), SamplingParams(temperature=0.0), [1], [], 1)
    made = _sampling(5).begin(torch.eye(5), [row] * 5, None, ()).result()
    assert [one.token for one in made] == [0, 1, 2, 3, 4]
    assert Room.made == []


def test_broken_rows_are_named_when_they_are_read() -> None:
    """Greedy and drawn alike."""
    greedy = SampleRow(("c", 0), SamplingParams(temperature=0.0), [1], [], 1)
    drawn = SampleRow(("c", 1), SamplingParams(), [1], [], 1)
    logits = torch.full((2, 9), torch.nan)
    pending = _sampling(9).begin(logits, [greedy, drawn], torch.zeros(2, dtype=torch.int64), [0, 1])
    with pytest.raises(BrokenLogits, match=r"\('c', 0\), \('c', 1\)"):
        pending.result()


def test_without_room_to_grow_the_rows_go_in_parts() -> None:
    """The room there is serves on; with none at all the error is the caller's."""
    logits, asked = random_batch(3, 40, 30)
    want = Sampler(base_seed=SEED).sample(logits, asked)
    sampling = _sampling(30)
    drawn = next(index for index, row in enumerate(asked) if not row.sampling.greedy)
    sampling.begin(logits[drawn : drawn + 1], [asked[drawn]], None, ()).result()
    Room.most = 1
    assert sampling.begin(logits, asked, None, ()).result() == want
    assert sampling.begin(logits, asked, None, ()).result() == want
    assert Room.made == [1]
    with pytest.raises(torch.OutOfMemoryError):
        _sampling(30).begin(logits, asked, None, ())


def test_a_reply_is_used_again_once_it_is_read() -> None:
    """Not before; and reading twice tells the same."""
    row = SampleRow(("c", 0), SamplingParams(temperature=0.0), [1], [], 1)
    sampling, logits = _sampling(5), torch.eye(5)
    first, second = (sampling.begin(logits[i : i + 1], [row], None, ()) for i in (2, 3))
    assert [one.token for one in (*second.result(), *first.result())] == [3, 2]
    third = sampling.begin(logits[4:], [row], None, ())
    assert [one.token for one in (*third.result(), *first.result())] == [4, 2]
    assert len(sampling._replies) == 2


def test_the_bytes_it_takes() -> None:
    """Growing up to the rows that are drawn at once, and no further."""
    wide = 151_936
    assert sampler_bytes(1, wide) > 8 * wide
    assert sampler_bytes(32, wide) < 32 * 12.5 * wide
    assert sampler_bytes(33, wide) == sampler_bytes(1000, wide) == sampler_bytes(32, wide)
