"""The sampler's draws: right distribution, and the same for a row alone and in any batch."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine_actor.core.params import SamplingParams
from engine_actor.model.inverse_cdf import invert, invert_tensors
from engine_actor.model.random_draw import mix, uniform, unseeded
from engine_actor.model.sampler import Sampler, SampleRow
from engine_actor.model.truncation import cutoffs

# Upper 1e-4 points of chi-square by degrees of freedom.
_LIMIT = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 9: 33.72, 15: 44.26}


_sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.2, 0.9, 0.9999, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 5000]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (7, -100.0))]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
)


def _row(sampling: SamplingParams, position: int, rid: int = 0) -> SampleRow:
    return SampleRow(("c", rid), sampling, [1, 2, 2], [3, 3, 9], position)


def _chi_square(counts: Counter[int], expected: dict[int, float]) -> float:
    assert set(counts) <= set(expected)
    return sum((counts[token] - want) ** 2 / want for token, want in expected.items())


@pytest.mark.parametrize("threads", [1, 2])
@settings(max_examples=20)
@given(rows=st.lists(_sampling, min_size=1, max_size=9), data=st.data())
def test_same_seed_alone_and_in_any_batch(
    threads: int, rows: list[SamplingParams], data: st.DataObject
) -> None:
    """F-15, A-23: tokens and logprobs are bit-equal alone, permuted and beside others."""
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        logits = torch.randn(len(rows), 3001, generator=generator) * 3
        made_of = [_row(sampling, 6 + index, index) for index, sampling in enumerate(rows)]
        sampler = Sampler(base_seed=5)
        together = sampler.sample(logits, made_of)
        order = data.draw(st.permutations(range(len(rows))))
        shuffled = sampler.sample(logits[order], [made_of[index] for index in order])
        assert [together[index] for index in order] == shuffled
        for index, row in enumerate(made_of):
            alone = Sampler(base_seed=5).sample(logits[index : index + 1], [row])
            assert alone == [together[index]]
    finally:
        torch.set_num_threads(1)


def test_unseeded_requests_differ_and_repeat() -> None:
    """Without a seed each request draws its own numbers, the same again after a preemption."""
    logits = torch.zeros(1, 1000)
    rows = [_row(SamplingParams(), 6, rid) for rid in range(50)]
    sampler = Sampler(base_seed=5)
    first = [sampler.sample(logits, [row])[0].token for row in rows]
    assert [sampler.sample(logits, [row])[0].token for row in rows] == first
    assert len(set(first)) > 40
    other = [Sampler(base_seed=6).sample(logits, [row])[0].token for row in rows]
    assert other != first
    assert unseeded(1, ("a", 1)) != unseeded(1, ("b", 1)) != unseeded(1, ("b", 2))


def test_the_mix_is_splitmix64() -> None:
    """Known outputs of the published generator, so that no platform can differ."""
    gamma = 0x9E3779B97F4A7C15
    assert [mix((1234567 + step * gamma) % 2**64) for step in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
    assert [uniform(seed, 0) for seed in (0, 1, -(2**63))] == [
        0.21648957086058618,
        0.9584342997387412,
        0.24478651977861854,
    ]


@pytest.mark.parametrize("keyed_by", ["seed", "position", "both"])
def test_uniform_numbers_are_uniform(keyed_by: str) -> None:
    """Chi-square over 16 bins, along seeds, along positions and along both at once; pairs too."""
    draws = [
        uniform(index if keyed_by != "position" else 3, index if keyed_by != "seed" else 11)
        for index in range(16000)
    ]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    bins = Counter(int(draw * 16) for draw in draws)
    assert _chi_square(bins, dict.fromkeys(range(16), 1000.0)) < _LIMIT[15]
    pairs = Counter(
        int(one * 4) * 4 + int(two * 4) for one, two in zip(draws[::2], draws[1::2], strict=True)
    )
    assert _chi_square(pairs, dict.fromkeys(range(16), 500.0)) < _LIMIT[15]


def _draw_many(sampling: SamplingParams, logits: list[float], count: int) -> Counter[int]:
    rows = [_row(sampling, position) for position in range(count)]
    made = Sampler().sample(torch.tensor([logits]).expand(count, -1), rows)
    return Counter(one.token for one in made)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution_follows_the_softmax(temperature: float) -> None:
    """Chi-square of 4,000 seeded draws against softmax(logits / temperature)."""
    logits = [2.0, 1.0, 0.0, -1.0, 0.5]
    shares = torch.softmax(torch.tensor(logits) / temperature, -1).tolist()
    counts = _draw_many(SamplingParams(temperature=temperature, seed=42), logits, 4000)
    assert _chi_square(counts, {i: 4000 * share for i, share in enumerate(shares)}) < _LIMIT[4]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.89}, [0, 1, 2]),
        ({"min_p": 0.4}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.75}, [0, 1]),
        ({"top_k": 3, "top_p": 0.79}, [0, 1, 2]),
        ({"top_p": 0.89, "min_p": 0.7}, [0, 1]),
    ],
)
def test_truncated_distribution(settings: dict[str, float], kept: list[int]) -> None:
    """Only the tokens that stay are drawn, in their own proportions. 0.4, 0.3, 0.2, 0.1; after
    top_k 3 the shares are 0.444, 0.333, 0.222.
    """
    shares = [0.4, 0.3, 0.2, 0.1]
    sampling = SamplingParams(seed=9, **settings)  # type: ignore[arg-type]
    counts = _draw_many(sampling, [math.log(share) for share in shares], 1000)
    total = sum(shares[token] for token in kept)
    expected = {token: 1000 * shares[token] / total for token in kept}
    assert _chi_square(counts, expected) < _LIMIT.get(len(kept) - 1, 1e-9)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.sampled_from([0, 1, 2, 30, 1500, 9999]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    scale=st.sampled_from([0.05, 1.0, 4.0, 20.0]),
)
def test_what_is_kept_equals_transformers(
    seed: int, top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    """The kept set against transformers' warpers in their order, flat and peaked rows alike. Tokens
    at the very edge of the share may differ, since they add fp32 numbers up and we add integers.
    """
    logits = torch.randn(1, 2500, generator=torch.Generator().manual_seed(seed)) * scale
    sampling = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = torch.softmax(logits, -1)
    cutoff = cutoffs(probabilities, [_row(sampling, 0)])
    kept = probabilities >= (0.0 if cutoff is None else cutoff)
    warped = logits
    ids = torch.zeros(1, 1, dtype=torch.int64)
    if top_k:
        warped = TopKLogitsWarper(top_k)(ids, warped)
    if top_p < 1.0:
        warped = TopPLogitsWarper(top_p)(ids, warped)
    if min_p:
        warped = MinPLogitsWarper(min_p)(ids, warped)
    differing = kept != warped.isfinite()
    assert probabilities[differing].sum() < 2e-3 * max(1.0 - top_p, 1e-3)
    assert differing.sum() <= 0.01 * max(kept.sum(), 200)


def test_a_flat_row_needs_more_than_the_head() -> None:
    """top_p over more tokens than the first look holds falls back to the whole, exactly."""
    probabilities = torch.full((2, 8000), 1 / 8000)
    probabilities[1] = torch.softmax(torch.linspace(0, -1e-3, 8000), -1)
    rows = [_row(SamplingParams(top_p=0.5), 0), _row(SamplingParams(top_p=0.5), 0)]
    cutoff = cutoffs(probabilities, rows)
    assert cutoff is not None
    kept = (probabilities >= cutoff).sum(-1).tolist()
    assert kept[0] == 8000, "equals are all kept"
    assert abs(kept[1] - 4000) <= 4


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    point=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
    least=st.one_of(st.none(), st.floats(0, 1)),
    width=st.sampled_from([1, 2, 255, 256, 257, 512, 900]),
    scale=st.sampled_from([0.1, 2.0, 30.0]),
)
def test_both_ways_to_invert_agree(
    seed: int, point: float, least: float | None, width: int, scale: float
) -> None:
    """The CPU's way, by blocks and over the kept tokens only, and the one for any device."""
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.softmax(torch.randn(1, width, generator=generator) * scale, -1)
    cutoff = None if least is None else probabilities.amax().reshape(1, 1) * least
    index = invert(probabilities, cutoff, [point])
    assert index == invert_tensors(probabilities, cutoff, [point])
    assert probabilities[0, index[0]] >= (1e-10 if cutoff is None else cutoff)


def test_a_token_without_probability_is_never_drawn() -> None:
    """Both ends of the unit interval, zeros in front, inside and behind."""
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for cutoff in (None, torch.tensor([[1e-3]])):
        for point, index in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)):
            assert invert(probabilities, cutoff, [point]) == [index]


@pytest.mark.gpu
def test_draws_on_the_gpu_equal_the_cpu() -> None:
    """The same probabilities give the same cutoffs and indices on either device."""
    probabilities = torch.softmax(torch.randn(16, 5003) * 3, -1)
    rows = [
        _row(SamplingParams(top_k=i * 7, top_p=1 - i / 40, min_p=i / 100), i) for i in range(16)
    ]
    points = [uniform(1, position) for position in range(16)]
    here, there = cutoffs(probabilities, rows), cutoffs(probabilities.cuda(), rows)
    assert here is not None
    assert there is not None
    assert torch.equal(here, there.cpu())
    assert invert(probabilities, here, points) == invert(probabilities.cuda(), there, points)
    assert invert(probabilities, None, points) == invert(probabilities.cuda(), None, points)
