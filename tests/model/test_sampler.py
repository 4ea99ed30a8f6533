"""The sampler's choices: greedy, penalties, bans, bias, logprobs. Draws: test_sampler_draws.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from engine_actor.core.params import InvalidParam, SamplingParams
from engine_actor.model.sampler import (
    BrokenLogits,
    Sampler,
    SampleRow,
    needs_history,
    token_logprobs,
)


def _row(
    sampling: SamplingParams,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
    rid: int = 0,
) -> SampleRow:
    return SampleRow(("c", rid), sampling, prompt, output, len(prompt) + len(output), banned)


def _greedy(**settings: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **settings)  # type: ignore[arg-type]


def _tokens(logits: list[list[float]], rows: Sequence[SampleRow]) -> list[int]:
    return [made.token for made in Sampler(base_seed=7).sample(torch.tensor(logits), rows)]


def test_greedy_is_the_first_of_the_largest() -> None:
    """Ties go to the lowest id, keys come back in the rows' order."""
    rows = [_row(_greedy(), rid=5), _row(_greedy(), rid=3)]
    made = Sampler().sample(torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, -math.inf]]), rows)
    assert [(one.key, one.token, one.logprobs) for one in made] == [
        (("c", 5), 1, None),
        (("c", 3), 0, None),
    ]
    assert Sampler().sample(torch.empty(0, 3), []) == []


@pytest.mark.parametrize(
    "settings", [{"temperature": 1e-9}, {"temperature": 0.0}, {"min_p": 1.0}, {"top_k": 1}]
)
def test_degenerate_settings_are_greedy(settings: dict[str, float]) -> None:
    """B-23: tiny temperatures and full truncation give the argmax, never NaN."""
    sampling = SamplingParams(**settings)  # type: ignore[arg-type]
    rows = [_row(sampling, rid=rid) for rid in range(20)]
    logits = torch.randn(20, 50) * 30
    made = Sampler().sample(logits, rows)
    assert [one.token for one in made] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "temperature"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    """B-23: what has no meaning is a named error at the door (top_k 0 is off)."""
    with pytest.raises(InvalidParam) as refusal:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert refusal.value.name == name
    with pytest.raises(InvalidParam):
        SamplingParams(top_p=0.0)
    assert SamplingParams(top_k=0).top_k == 0


def test_tiny_top_p_keeps_the_most_probable() -> None:
    """B-23: a top_p below any single probability is greedy."""
    logits = torch.randn(30, 3000)
    rows = [_row(SamplingParams(top_p=1e-9), rid=rid) for rid in range(30)]
    assert [one.token for one in Sampler().sample(logits, rows)] == logits.argmax(-1).tolist()


def test_presence_and_frequency_look_at_the_output_only() -> None:
    """B-27: prompt ids cost nothing; frequency counts, presence does not; greedy path too."""
    logits = [[3.0, 2.0, 1.5]]
    assert _tokens(logits, [_row(_greedy(presence_penalty=2.0), [0, 0, 0])]) == [0]
    assert _tokens(logits, [_row(_greedy(presence_penalty=0.9), [0], [0, 0, 0])]) == [0]
    assert _tokens(logits, [_row(_greedy(presence_penalty=1.1), [0], [0, 0, 0])]) == [1]
    assert _tokens(logits, [_row(_greedy(frequency_penalty=0.4), [0], [0, 0])]) == [0]
    assert _tokens(logits, [_row(_greedy(frequency_penalty=0.4), [0], [0, 0, 0])]) == [1]
    assert _tokens(logits, [_row(_greedy(frequency_penalty=-2.0), [0], [2])]) == [2]


def test_repetition_counts_prompt_and_output_once() -> None:
    """B-27: once for each distinct id; positive logits shrink, negative ones sink."""
    assert _tokens([[3.0, 2.0]], [_row(_greedy(repetition_penalty=1.4), [0, 0, 0, 0])]) == [0]
    assert _tokens([[3.0, 2.0]], [_row(_greedy(repetition_penalty=1.6), [0])]) == [1]
    assert _tokens([[3.0, 2.0]], [_row(_greedy(repetition_penalty=1.6), [1], [0, 0])]) == [0]
    assert _tokens([[-1.0, -1.5]], [_row(_greedy(repetition_penalty=1.6), [0])]) == [1]


def test_penalties_hold_in_a_batch_and_leave_the_logits_alone() -> None:
    """B-27: beside other rows; B-14: an edit never reaches the neighbour."""
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 4)
    before = logits.clone()
    rows = [
        _row(_greedy(), [0], [0], rid=0),
        _row(_greedy(presence_penalty=1.5), [0], [0], rid=1),
        _row(_greedy(logit_bias=((2, 5.0),)), [0], [0], rid=2),
        _row(SamplingParams(min_p=1.0), [0], [0], banned=(0, 1), rid=3),
    ]
    made = Sampler().sample(logits, rows)
    assert [one.token for one in made] == [0, 1, 2, 2]
    assert torch.equal(logits, before)


def test_order_of_bias_and_repetition() -> None:
    """Bias first: a biased logit is what the repetition penalty divides."""
    sampling = _greedy(logit_bias=((0, 4.0),), repetition_penalty=2.0)
    assert _tokens([[2.0, 2.9, -9.0]], [_row(sampling, [0])]) == [0]
    assert _tokens([[2.0, 3.1, -9.0]], [_row(sampling, [0])]) == [1]


@pytest.mark.parametrize("token", [999999, -1])
def test_ids_outside_the_vocabulary(token: int) -> None:
    """B-14: refused by name at the door, and without effect on any row if they get past it."""
    sampling = _greedy(logit_bias=((token, 100.0),), stop_token_ids=(1,))
    with pytest.raises(InvalidParam) as refusal:
        sampling.require_vocabulary(3)
    assert refusal.value.name == "logit_bias"
    with pytest.raises(InvalidParam) as refusal:
        SamplingParams(stop_token_ids=(token,)).require_vocabulary(3)
    assert refusal.value.name == "stop_token_ids"
    rows = [_row(_greedy()), _row(sampling, [token], [token], banned=(token,)), _row(_greedy())]
    assert _tokens([[1.0, 2.0, 0.0]] * 3, rows) == [1, 1, 1]


def test_every_banned_id_is_out_before_min_tokens() -> None:
    """All eos ids are banned together; the best of the rest is made, greedy or drawn."""
    for sampling in (_greedy(min_tokens=2), SamplingParams(min_tokens=2, top_k=1)):
        assert _tokens([[9.0, 8.0, 7.0, 1.0]], [_row(sampling, banned=(0, 1, 2))]) == [3]


@pytest.mark.parametrize("strength", [5e-324, 1e-40, 1e-30])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_the_smallest_repetition_penalty_is_a_choice_of_seen_ids(
    strength: float, temperature: float
) -> None:
    """What the door lets in never makes infinities, which would be NaN after the softmax."""
    sampling = SamplingParams(temperature=temperature, repetition_penalty=strength, seed=1)
    row = _row(sampling, prompt=[1], output=[2])
    logits = [[50.0, 3.0, -2.0], [50.0, -math.inf, 0.5]]
    assert _tokens(logits[:1], [row]) == [1]
    assert _tokens(logits[1:], [row]) == [2]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_broken_logits_are_an_error_that_names_the_row(
    broken: float, temperature: float, logprobs: int | None
) -> None:
    sampling = SamplingParams(temperature=temperature, logprobs=logprobs)
    rows = [_row(sampling, rid=rid) for rid in range(3)]
    logits = torch.zeros(3, 8)
    logits[1, 5] = broken
    with pytest.raises(BrokenLogits, match=r"\[\('c', 1\)\]"):
        Sampler().sample(logits, rows)
    with pytest.raises(BrokenLogits):
        Sampler().sample(torch.full((3, 8), -math.inf), rows)


def test_padded_ids_are_never_made() -> None:
    """Logits of the embedding's padding rows are cut off before anything looks at them."""
    logits = torch.zeros(40, 12)
    logits[:, 10:] = 50.0
    rows = [
        _row(SamplingParams(temperature=rid % 3 * 0.7, logprobs=rid % 2 or None, top_k=5), rid=rid)
        for rid in range(40)
    ]
    made = Sampler(vocab_size=10, base_seed=1).sample(logits, rows)
    assert all(one.token < 10 for one in made)
    assert made[1].logprobs is not None
    assert made[1].logprobs.logprob == pytest.approx(-math.log(10))


def test_logprobs_are_those_of_the_model() -> None:
    """Raw log-softmax whatever the sampling; the asked number of alternatives, best first."""
    logits = torch.tensor([[1.0, 3.0, 2.0, -math.inf]] * 3)
    expected = torch.log_softmax(logits[0], -1).tolist()
    rows = [
        _row(_greedy(logprobs=2, logit_bias=((0, 50.0),)), rid=0),
        _row(_greedy(), rid=1),
        _row(SamplingParams(temperature=0.1, logprobs=0), rid=2),
    ]
    made = Sampler(base_seed=3).sample(logits, rows)
    first = made[0].logprobs
    assert first is not None
    assert (first.token, [token for token, _ in first.top]) == (0, [1, 2])
    assert first.logprob == pytest.approx(expected[0], abs=1e-6)
    assert [value for _, value in first.top] == pytest.approx([expected[1], expected[2]], abs=1e-6)
    assert made[1].logprobs is None
    last = made[2].logprobs
    assert last is not None
    assert last.top == ()
    assert last.logprob == pytest.approx(expected[made[2].token], abs=1e-6)


def test_prompt_logprobs_are_finite_and_row_independent() -> None:
    """Slices of any size give equal bits; minus infinity is reported as a number JSON can hold."""
    logits = torch.randn(9, 4001) * 4
    logits[0, 5] = -math.inf
    targets = torch.tensor([5, *range(8)])
    whole = token_logprobs(logits, targets, 3)
    pieces = [token_logprobs(logits[i : i + 1], targets[i : i + 1], 3)[0] for i in range(9)]
    assert list(whole) == pieces
    assert whole[0].logprob == -9999.0
    assert [len(one.top) for one in whole] == [3] * 9
    assert token_logprobs(logits[:0], targets[:0], 3) == ()
    assert len(token_logprobs(torch.zeros(1, 2), [0], 20)[0].top) == 2


def test_begin_gives_the_tokens_later_and_leaves_them_in_the_buffer() -> None:
    """Row i's token at its slot, nothing elsewhere; sample() is begin().result()."""
    logits = torch.randn(3, 40)
    rows = [_row(_greedy(), rid=0), _row(SamplingParams(seed=4), rid=1), _row(_greedy(), rid=2)]
    tokens = torch.full((6,), -1)
    pending = Sampler(base_seed=7).begin(logits, rows, tokens, [4, 0, 5])
    made = [one.token for one in pending.result()]
    assert made == [one.token for one in Sampler(base_seed=7).sample(logits, rows)]
    assert tokens.tolist() == [made[1], -1, -1, -1, made[0], made[2]]


def test_begin_tells_of_broken_logits_in_result() -> None:
    """The rows are enqueued whatever they hold; who reads them hears of it."""
    pending = Sampler().begin(torch.full((1, 4), math.nan), [_row(_greedy())], torch.zeros(2), [1])
    with pytest.raises(BrokenLogits, match="no finite logits"):
        pending.result()


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": ((1, 2.0),), "seed": 3, "top_p": 0.5, "min_tokens": 2}, False),
    ],
)
def test_only_penalties_need_the_tokens_before(settings: dict[str, object], needs: bool) -> None:
    """Those of a step in flight are not known to the host."""
    row = _row(SamplingParams(**settings), banned=(2,))  # type: ignore[arg-type]
    assert needs_history(row) is needs
