"""Requests as jobs: what the engine is asked, and what is refused first. B-08, B-14, B-23, B-25."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.messages import Submit
from serve_app.protocol.bodies import parse_model
from serve_app.protocol.chat import ChatRequest
from serve_app.protocol.completions import CompletionRequest
from serve_app.protocol.convert import chat_job, completion_job, require_ids
from serve_app.protocol.errors import ApiError
from serve_app.protocol.job import EncodedPrompt, GenerationJob
from serve_app.protocol.models import ServedModel

SERVED = ServedModel("m", 1, max_model_len=512, kv_tokens=1024, vocab_size=1000)
PROMPT = EncodedPrompt((1, 2, 3), "abc")


def job(served: ServedModel = SERVED, prompts: Any = (PROMPT,), **body: Any) -> GenerationJob:
    request = parse_model(CompletionRequest, {"prompt": "abc", **body})
    return completion_job(request, prompts, served, max_logprobs=5)


def refused(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        job(**body)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_openai_s() -> None:
    sampling = job().sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0, 0.0, 1.0)
    assert sampling.logprobs is None
    assert sampling.seed is None


@pytest.mark.parametrize("bias", [{"1000": 5}, {"999999": 5}, {"-1": 5}])
def test_ids_outside_the_vocabulary_are_refused(bias: dict[str, int]) -> None:
    """B-14."""
    assert refused(logit_bias=bias).param == "logit_bias"


@pytest.mark.parametrize("ids", [[1000], [-1], [5, 10**400]])
def test_stop_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    """B-14."""
    assert refused(stop_token_ids=ids).param == "stop_token_ids"


def test_min_tokens_leaves_something_to_draw() -> None:
    """Huge values are refused by name; so is a ban of the whole vocabulary."""
    assert refused(min_tokens=10**400).param == "min_tokens"
    served = ServedModel("m", 1, 512, 1024, vocab_size=4, eos_token_ids=(3,))
    with pytest.raises(ApiError) as caught:
        job(served, min_tokens=1, stop_token_ids=[0, 1, 2])
    assert (caught.value.status, caught.value.param) == (400, "stop_token_ids")
    assert job(served, min_tokens=1, stop_token_ids=[0, 1]).sampling.min_tokens == 1
    assert job(served, stop_token_ids=[0, 1, 2, 3]).sampling.min_tokens == 0


@pytest.mark.parametrize("ids", [[-1], [1000], [3, 2**70]])
def test_prompt_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    """B-28: `"prompt": [[-1]]`."""
    with pytest.raises(ApiError) as caught:
        require_ids(ids, 1000, "prompt")
    assert caught.value.param == "prompt"
    require_ids([0, 999], 1000, "prompt")


def test_extreme_sampling_values_are_greedy_or_refused() -> None:
    """B-23."""
    assert job(temperature=1e-9).sampling.greedy
    assert refused(top_p=0).param == "top_p"
    assert job(top_k=0).sampling.top_k == 0
    assert job(top_k=-1).sampling.top_k == 0
    assert job(top_k=10**30).sampling.top_k == 0
    assert job(top_k=7).sampling.top_k == 7
    assert job(min_p=1).sampling.min_p == 1.0
    for name, value in (("temperature", -1), ("temperature", 2.1), ("presence_penalty", 3)):
        assert refused(**{name: value}).param == name
    assert refused(seed=2**63).param == "seed"
    assert refused(logit_bias={"5": 101}).param == "logit_bias"
    assert refused(min_tokens=20, max_tokens=4).param == "min_tokens"


def test_best_of_rules() -> None:
    """B-28: best_of below n; F-06: not streamed."""
    assert refused(best_of=1, n=2).param == "best_of"
    assert refused(best_of=3, n=2, stream=True).param == "best_of"
    ranked = job(best_of=3, n=2)
    assert (ranked.n_children, ranked.sampling.logprobs, ranked.logprobs) == (3, 0, None)
    assert job(best_of=2, n=2, stream=True).sampling.logprobs is None


def test_each_choice_of_a_seeded_request_has_its_own_seed() -> None:
    submits = job(n=3, seed=2**63 - 1).submits(10)
    assert [s.rid for s in submits] == [10, 11, 12]
    assert [s.sampling.seed for s in submits] == [2**63 - 1, -(2**63), -(2**63) + 1]


def test_submits_carry_everything() -> None:
    two = (PROMPT, EncodedPrompt((9,), "z"))
    one = job(prompts=two, n=2, priority=-3, timeout=0.0015, cache_salt="s", request_id="r")
    first, *_, last = one.submits(5)
    assert first == Submit(5, (1, 2, 3), one.sampling, -3, 2, "s", "r")
    assert (last.rid, last.prompt_ids) == (8, (9,))


def test_a_request_larger_than_the_pool_is_refused_with_numbers() -> None:
    """B-08, F-80."""
    pool = ServedModel("m", 1, max_model_len=512, kv_tokens=64, vocab_size=1000)
    fifty = (EncodedPrompt(tuple(range(50)), "x"),)
    error = refused(served=pool, prompts=fifty, max_tokens=100)
    assert error.code == "context_length_exceeded"
    assert error.param == "max_tokens"
    assert "needs 150 tokens" in error.message
    assert "KV pool holds 64" in error.message
    assert job(served=pool, prompts=fifty, max_tokens=14).sampling.max_tokens == 14
    assert job(served=pool, prompts=fifty).sampling.max_tokens == 14
    whole = (EncodedPrompt(tuple(range(64)), "x"),)
    assert refused(served=pool, prompts=whole).param == "prompt"
    assert "context is 512" in refused(max_tokens=10**400).message


def test_stream_options_only_with_stream() -> None:
    """B-25."""
    assert refused(stream_options={"include_usage": True}).param == "stream_options"
    assert refused(stream=False, stream_options={}).param == "stream_options"
    assert job(stream=True, stream_options={"include_usage": True}).include_usage
    assert not job(stream=True).include_usage


def test_logprobs_limits() -> None:
    assert refused(logprobs=6).param == "logprobs"
    echoed = job(logprobs=2, echo=True, max_tokens=0)
    assert echoed.sampling.prompt_logprobs == 2
    assert echoed.needs_engine
    assert not job(max_tokens=0).needs_engine


def chat(**body: Any) -> GenerationJob:
    messages = [{"role": "user", "content": "x"}]
    return chat_job(parse_model(ChatRequest, {"messages": messages, **body}), PROMPT, SERVED)


def test_chat_fills_the_context_by_default() -> None:
    assert chat().sampling.max_tokens == 509
    assert chat(max_tokens=3).sampling.max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=7).sampling.max_tokens == 7


def test_chat_logprobs() -> None:
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=False).logprobs is None
    for body in ({"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(ApiError) as caught:
            chat(**body)
        assert caught.value.param == "top_logprobs"


def test_an_unknown_model_is_a_404() -> None:
    """F-02."""
    with pytest.raises(ApiError) as caught:
        job(model="other")
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert job(model="m").model == "m"
