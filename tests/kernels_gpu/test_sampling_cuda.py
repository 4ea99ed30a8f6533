"""The device's argmax, edits and draws against the sampler that defines them: equal tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from engine_actor.core.params import SamplingParams
from engine_actor.model.penalties import SampleRow, edit
from engine_actor.model.random_draw import uniform
from engine_actor.model.sampler import Sampler
from kernels.sampling.cuda import (
    DeviceArgmax,
    DeviceSampler,
    Outcome,
    Sent,
    new_outcome,
)
from kernels.sampling.op import Draw, Edit, RowPacker, draw_reference

pytestmark = pytest.mark.gpu

WIDTHS = (7, 300, 4097, 151_936)


def sampler_for(logits: torch.Tensor) -> DeviceSampler:
    return DeviceSampler(logits.shape[0], logits.shape[1], logits.device)


def outcome_for(rows: int) -> Outcome:
    """Poisoned, on the host as well."""
    outcome = new_outcome(rows, torch.device("cuda"))
    outcome.packed.fill_(77)
    outcome.host = torch.full((9 * rows,), 77, dtype=torch.uint8).pin_memory()
    return outcome


def host_is_told(outcome: Outcome) -> bool:
    """The same as the device."""
    torch.cuda.synchronize()
    assert outcome.host is not None
    return torch.equal(outcome.host, outcome.packed.cpu())


def sent_to(
    device: DeviceSampler,
    draws: Sequence[Draw],
    edits: Sequence[Edit],
    rows: Sequence[int] | None = None,
) -> tuple[Sent, int]:
    """And how many of its rows are counted. rows: of the batch, by default in order."""
    packer = RowPacker(device.rows)
    for row, draw, edit_of_row in zip(rows or range(len(draws)), draws, edits, strict=True):
        packer.add(row, draw, edit_of_row)
    packed = torch.frombuffer(bytearray(packer.packed()), dtype=torch.uint8).cuda()
    return Sent(packed, packer.biases_at, packer.ids_at), packer.most_counted


def drawn_by(
    device: DeviceSampler, logits: torch.Tensor, draws: Sequence[Draw], temperature: float
) -> tuple[Outcome, torch.Tensor]:
    """What the device draws at a temperature, and the logits that it drew from."""
    edits = [Edit(0.0 if draw.greedy else temperature) for draw in draws]
    sent, _ = sent_to(device, draws, edits)
    outcome = outcome_for(len(draws))
    scaled = device.edit(logits, sent, 0, len(draws)).clone()
    device.draw(sent, 0, len(draws), outcome)
    return outcome, scaled


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax(width: int) -> None:
    """Lowest index among equals, NaN on top, broken rows told, counters ready for the next call."""
    logits = torch.randn(9, width, device="cuda")
    logits[1, [2, 5]] = 50.0
    logits[2] = 0.25
    logits[3, 4] = torch.nan
    logits[4] = -torch.inf
    logits[5] = -torch.inf
    logits[5, 6] = -1e30
    logits[6, 3] = torch.inf
    logits[7] = -0.0
    logits[7, 5] = 0.0
    argmax = DeviceArgmax(9, logits.device)
    apart = torch.randn(9, width + 5, device="cuda")
    apart[:, :width] = logits
    finite = [1, 1, 1, 0, 0, 1, 0, 1, 1]
    for asked in (logits, logits[:1], logits[3:5], logits, apart[:, :width]):
        first, rows = (3, 2) if len(asked) == 2 else (0, len(asked))
        outcome = outcome_for(rows)
        argmax(asked, outcome)
        assert outcome.tokens.tolist() == asked.cpu().argmax(-1).tolist()
        assert outcome.finite.tolist() == finite[first : first + rows]
        assert host_is_told(outcome)


def test_rows_of_a_batch_are_told_where_they_stand() -> None:
    """Some rows by argmax, others drawn; each in its place and in its slot, nothing elsewhere."""
    logits = torch.randn(4, 5000, device="cuda")
    by_slot = torch.full((8,), -1, device="cuda")
    slots = torch.tensor([6, 0, 3, 5], device="cuda")
    outcome = outcome_for(4)
    outcome.by_slot, outcome.slots = by_slot, slots
    DeviceArgmax(4, logits.device)(logits, outcome)
    device = DeviceSampler(2, 5000, logits.device)
    chosen = [3, 1]
    draws = [Draw(top_k=3, seed=5), Draw(greedy=True)]
    edits = [Edit(temperature=0.5), Edit(bias={77: 100.0})]
    sent, _ = sent_to(device, draws, edits, chosen)
    device.edit(logits, sent, 0, 2)
    device.draw(sent, 0, 2, outcome)
    want = logits.argmax(-1).tolist()
    want[1] = 77
    want[3] = draw_reference(device.probabilities[0], draws[0], uniform(5, 0))
    assert outcome.tokens.tolist() == want
    assert outcome.finite.tolist() == [1, 1, 1, 1]
    assert host_is_told(outcome)
    assert by_slot.tolist() == [want[1], -1, -1, want[2], -1, want[3], want[0], -1]


DRAWS = (
    Draw(),
    Draw(top_k=1),
    Draw(top_k=5),
    Draw(top_k=50, top_p=0.9),
    Draw(top_p=0.5),
    Draw(top_p=0.999),
    Draw(top_p=1e-9),
    Draw(min_p=0.05),
    Draw(top_k=40, top_p=0.95, min_p=0.02),
    Draw(top_k=10**6),
    Draw(greedy=True),
    Draw(top_k=3000, top_p=0.3),
)


def keyed(draws: tuple[Draw, ...], seed: int) -> list[Draw]:
    """The same with seeds and positions of all sizes."""
    draw = random.Random(seed)
    return [
        Draw(d.top_p, d.min_p, d.top_k, draw.randrange(2**64), draw.randrange(10**6), d.greedy)
        for d in draws
    ]


def expected(device: DeviceSampler, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """The references' tokens for the probabilities that the device made."""
    return [
        int(logits[row].argmax())
        if d.greedy
        else draw_reference(device.probabilities[row], d, uniform(d.seed, d.position))
        for row, d in enumerate(draws)
    ]


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_draws_equal_the_reference(width: int, spread: float) -> None:
    """The same probabilities give the same token, flat and peaked, ties included."""
    logits = torch.randn(len(DRAWS), width, device="cuda") * spread
    logits[:, ::3] = logits[:, :1].clone()
    device = sampler_for(logits)
    for seed in range(3):
        draws = keyed(DRAWS, seed)
        outcome, scaled = drawn_by(device, logits, draws, 0.8)
        assert outcome.tokens.tolist() == expected(device, logits, draws)
    drawn = [row for row, d in enumerate(DRAWS) if not d.greedy]
    want = torch.softmax(scaled[drawn].double(), -1)
    torch.testing.assert_close(device.probabilities[drawn].double(), want, rtol=2e-5, atol=1e-12)
    assert outcome.finite.tolist() == [1] * len(DRAWS)


def test_a_row_gives_the_same_bits_in_any_batch() -> None:
    """Alone, and third of five."""
    logits = torch.randn(5, 50_000, device="cuda") * 4
    many, alone = sampler_for(logits), sampler_for(logits[:1])
    draws = keyed((Draw(top_p=0.9),) * 5, 1)
    token = int(drawn_by(many, logits, draws, 0.7)[0].tokens[2])
    assert int(drawn_by(alone, logits[2:3], draws[2:3], 0.7)[0].tokens[0]) == token
    assert torch.equal(alone.probabilities[0], many.probabilities[2])


def test_draws_equal_the_engines_sampler() -> None:
    """Seeded rows, mixed with greedy ones, over many positions."""
    width, rows = 32_000, 24
    draw = random.Random(3)
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 0.7, 1.0, 1.5]),
            top_k=draw.choice([0, 1, 20, 500]),
            top_p=draw.choice([1.0, 0.9, 0.3]),
            min_p=draw.choice([0.0, 0.0, 0.1]),
            seed=draw.randrange(2**32),
        )
        for _ in range(rows)
    ]
    sampler = Sampler(base_seed=1)
    for position in (0, 9, 100_000):
        logits = torch.randn(rows, width, device="cuda") * 3
        device = sampler_for(logits)
        asked = [SampleRow(("c", i), p, [], [], position) for i, p in enumerate(params)]
        want = [token.token for token in sampler.sample(logits.cpu(), asked)]
        draws = [Draw(p.top_p, p.min_p, p.top_k, p.seed or 0, position, p.greedy) for p in params]
        sent, _ = sent_to(device, draws, [Edit(p.temperature) for p in params])
        outcome = outcome_for(rows)
        device.edit(logits, sent, 0, rows)
        device.draw(sent, 0, rows, outcome)
        assert outcome.tokens.tolist() == want


def test_edits_equal_the_engines_penalties() -> None:
    """Bias, repetition, frequency, presence and bans, to the last bit of the CPU's definition; rows
    of no history between those that have one, strange ids nowhere."""
    width, rows = 5000, 8
    draw = random.Random(5)
    asked, edits = [], []
    for i in range(rows):
        prompt = [draw.randrange(width) for _ in range(40)] + [width, -1]
        output = [draw.randrange(200) for _ in range(100 * (i % 3))]
        bias = {draw.randrange(width): draw.uniform(-50, 50) for _ in range(10)}
        penalised = i % 4 != 1
        params = SamplingParams(
            temperature=1.0,
            presence_penalty=draw.choice([0.0, 0.7, -1.1]) * penalised,
            frequency_penalty=draw.choice([0.0, 0.3]) * penalised,
            repetition_penalty=draw.choice([1.3, 0.8]) if penalised else 1.0,
            logit_bias=tuple(bias.items()),
        )
        banned = [1, 2, width - 1]
        asked.append(SampleRow(("c", i), params, prompt, output, 140, banned))
        edits.append(
            Edit(
                1.0 if i % 2 else 0.0,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
                bias,
                banned,
                (prompt, output) if penalised else None,
            )
        )
    logits = torch.randn(rows, width) * 10
    want = edit(logits, asked)
    device = DeviceSampler(3, width, torch.device("cuda"))
    sent, counted = sent_to(device, [Draw()] * rows, edits)
    counts = torch.empty(counted, width, dtype=torch.int32, device="cuda")
    for first in range(0, rows, 3):
        part = min(3, rows - first)
        device.count(sent, first, part, counts.zero_())
        got = device.edit(logits.cuda(), sent, first, part, counts)
        assert torch.equal(got.cpu(), want[first : first + part])


def test_a_step_of_sampling_is_captured_and_replayed() -> None:
    """Fixed addresses: new logits and new draws go in by copies."""
    width, rows = 9000, 4
    logits = torch.zeros(rows, width, device="cuda")
    device = sampler_for(logits)
    edits = [Edit(temperature=0.9)] * rows
    sent, _ = sent_to(device, [Draw()] * rows, edits)
    outcome = outcome_for(rows)
    device.edit(logits, sent, 0, rows)
    device.draw(sent, 0, rows, outcome)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.edit(logits, sent, 0, rows)
        device.draw(sent, 0, rows, outcome)
    for seed in range(4):
        logits.normal_().mul_(3)
        draws = keyed((Draw(top_p=0.8), Draw(greedy=True), Draw(top_k=9), Draw()), seed)
        sent.packed.copy_(sent_to(device, draws, edits)[0].packed)
        graph.replay()
        assert outcome.tokens.tolist() == expected(device, logits, draws)


def test_broken_rows_are_told() -> None:
    """NaN, infinity, nothing finite, all banned but one: greedy and drawn alike."""
    for greedy in (False, True):
        logits = torch.randn(6, 9000, device="cuda")
        logits[1, 77] = torch.nan
        logits[2, 8000] = torch.inf
        logits[3] = -torch.inf
        logits[4] = -torch.inf
        logits[4, 5001] = -3.0
        device = sampler_for(logits)
        draws = [Draw(top_p=0.9, seed=i, greedy=greedy) for i in range(6)]
        outcome, _ = drawn_by(device, logits, draws, 1.0)
        tokens = outcome.tokens.tolist()
        assert outcome.finite.tolist() == [1, 0, 0, 0, 1, 1]
        assert tokens[4] == 5001
        assert all(0 <= token < 9000 for token in tokens)
