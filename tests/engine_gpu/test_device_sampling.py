"""The sampler on the GPU against the sampler on the CPU: the same logits, the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.core.params import SamplingParams
from engine_actor.model.device_sampling import sampler_bytes
from engine_actor.model.penalties import SampleRow, edit
from engine_actor.model.random_draw import uniform
from engine_actor.model.sampler import BrokenLogits, Sampler
from kernels.sampling.op import Draw, draw_reference
from tests.doubles.sampling_batches import random_batch

pytestmark = pytest.mark.gpu
SEED = 5
ON_THE_EDGE = 2e-6
"""How far a draw's point may lie from the border of two tokens for either to be right: the device's
exponential and sum are not the CPU's to the last bit."""


def _gpu_tokens(
    logits: torch.Tensor, rows: Sequence[SampleRow], sampler: Sampler | None = None
) -> list[int]:
    """Through the token buffer, which must say what result() says."""
    there = logits.cuda()
    kept = there.clone()
    tokens = torch.full((len(rows) + 3,), -1, device="cuda")
    slots = [(7 * i + 2) % len(tokens) for i in range(len(rows))] if len(tokens) % 7 else None
    slots = slots or list(range(len(rows)))
    pending = (sampler or Sampler(base_seed=SEED)).begin(there, rows, tokens, slots)
    made = [one.token for one in pending.result()]
    assert tokens[slots].tolist() == made
    assert int((tokens == -1).sum()) == 3
    assert torch.equal(there, kept)
    return made


def _with(row: SampleRow, params: SamplingParams) -> SampleRow:
    return SampleRow(row.key, params, row.prompt_ids, row.output_ids, row.position, row.banned)


def _could_be(token: int, logits: torch.Tensor, row: SampleRow, sampler: Sampler) -> bool:
    """Whether a point a hair away, or a probability cut a hair elsewhere, gives this token."""
    edited = edit(logits[None], [row])[0]
    params, point = row.sampling, uniform(sampler._seed_of(row), row.position)
    probabilities = torch.softmax(edited / params.temperature, -1)
    for share in (params.top_p, params.top_p * (1 - ON_THE_EDGE), params.top_p * (1 + ON_THE_EDGE)):
        draw = Draw(min(share, 1.0), params.min_p, params.top_k)
        for moved in (point, point - ON_THE_EDGE, point + ON_THE_EDGE):
            if draw_reference(probabilities, draw, min(max(moved, 0.0), 1 - 1e-9)) == token:
                return True
    return False


def test_thousands_of_rows_are_the_cpus() -> None:
    """Every kind of row, in batches of every size; equal but for points that lie on a border."""
    sampler, apart, total = Sampler(base_seed=SEED), 0, 0
    for seed, (rows, width) in enumerate(
        [(1, 300), (7, 5000), (33, 32_000), (64, 4099), (200, 9000)] * 5 + [(24, 151_936)] * 2
    ):
        logits, asked = random_batch(seed, rows, width)
        want = [one.token for one in sampler.sample(logits, asked)]
        got = _gpu_tokens(logits, asked)
        for index in range(rows):
            if got[index] != want[index]:
                assert not asked[index].sampling.greedy
                assert _could_be(got[index], logits[index], asked[index], sampler)
                apart += 1
        total += rows
    print(f"{apart} of {total} rows lie on a border")
    assert apart <= total // 500


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 0.8, 2.0]) | st.floats(0, 2),
    top_p=st.floats(1e-6, 1.0),
    top_k=st.integers(0, 700),
    min_p=st.floats(0, 1),
    presence_penalty=st.sampled_from([0.0, -2.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.1, 10.0]) | st.floats(0.01, 10),
    logit_bias=st.lists(st.tuples(st.integers(-3, 700), st.floats(-100, 100))).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
)
ROWS = st.builds(
    SampleRow,
    key=st.tuples(st.just("c"), st.integers(0, 2**40)),
    sampling=PARAMS,
    prompt_ids=st.lists(st.integers(0, 600), max_size=20),
    output_ids=st.lists(st.integers(0, 600), max_size=20),
    position=st.integers(0, 2**31),
    banned=st.lists(st.integers(-1, 600), max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_any_parameters(rows: list[SampleRow], seed: int) -> None:
    """What hypothesis finds worth asking."""
    logits = torch.randn(len(rows), 600, generator=torch.Generator().manual_seed(seed)) * 4
    sampler = Sampler(base_seed=SEED)
    want = [one.token for one in sampler.sample(logits, rows)]
    got = _gpu_tokens(logits, rows)
    for index, row in enumerate(rows):
        assert got[index] == want[index] or _could_be(got[index], logits[index], row, sampler)


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    """To the last bit: no border excuses a difference."""
    logits, rows = random_batch(1, 70, 20_000)
    got = _gpu_tokens(logits, rows)
    for index in range(0, 70, 3):
        assert _gpu_tokens(logits[index : index + 1], [rows[index]]) == [got[index]]


def test_logprobs_are_the_cpus() -> None:
    """Of the unedited logits, for the rows that ask, as many as each asks for."""
    logits, rows = random_batch(2, 50, 3000)
    rows = [_with(row, replace(row.sampling, temperature=0.0)) for row in rows]
    want = Sampler(base_seed=SEED).sample(logits, rows)
    got = Sampler(base_seed=SEED).sample(logits.cuda(), rows)
    asked = 0
    for one, other in zip(got, want, strict=True):
        assert (one.key, one.token) == (other.key, other.token)
        if other.logprobs is None:
            assert one.logprobs is None
            continue
        asked += 1
        assert one.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=2e-5)
        assert [score for _, score in one.logprobs.top] == pytest.approx(
            [score for _, score in other.logprobs.top], abs=2e-5
        )
    assert asked > 10


def test_padding_of_the_vocabulary_is_cut_off() -> None:
    """Rows that are apart, by a view: nothing is copied, no padded id is drawn."""
    logits, rows = random_batch(3, 20, 1000)
    padded = torch.full((20, 1024), 1e9)
    padded[:, :1000] = logits
    sampler = Sampler(1000, base_seed=SEED)
    assert _gpu_tokens(padded, rows, sampler) == _gpu_tokens(logits, rows)


def test_broken_rows_are_told_in_result() -> None:
    """By their keys; the rows around them still fill their slots."""
    logits, rows = random_batch(4, 12, 500)
    logits[5], logits[7, 3] = torch.nan, torch.inf
    logits[6] = -torch.inf
    rows[7] = _with(rows[7], SamplingParams())
    tokens = torch.full((12,), -1, device="cuda")
    pending = Sampler(base_seed=SEED).begin(logits.cuda(), rows, tokens, range(12))
    with pytest.raises(BrokenLogits) as told:
        pending.result()
    assert [f"('client', {row})" in str(told.value) for row in range(12)] == [
        row in (5, 6, 7) for row in range(12)
    ]
    assert bool(((tokens >= 0) & (tokens < 500)).all())


def test_a_nan_in_a_seen_id_is_not_hidden_by_its_penalty() -> None:
    """The bound on what a penalty makes larger must not turn it into a number."""
    logits = torch.zeros(1, 300)
    logits[0, 9] = torch.nan
    row = SampleRow(("c", 0), SamplingParams(repetition_penalty=1.5), [9], [], 1)
    with pytest.raises(BrokenLogits):
        Sampler().sample(logits.cuda(), [row])


def test_begin_waits_for_nothing() -> None:
    """Behind a kernel that takes long, begin() returns while the token is not there yet."""
    logits, rows = random_batch(6, 9, 2000)
    sampler = Sampler(base_seed=SEED)
    there = logits.cuda()
    want = [one.token for one in sampler.sample(there, rows)]
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    pending = sampler.begin(there, rows)
    behind = torch.cuda.Event()
    behind.record()
    assert not behind.query()
    assert [one.token for one in pending.result()] == want


def test_it_takes_no_more_than_it_says() -> None:
    """Penalties and logprobs for all rows at once."""
    width, params = 50_000, SamplingParams(repetition_penalty=1.1, logprobs=3)
    rows = [SampleRow(("c", i), params, [1, 2], [3], 3) for i in range(40)]
    logits = torch.randn(40, width, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    Sampler().sample(logits, rows)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= sampler_bytes(40, width) + (1 << 20)
