"""`/v1/completions` over a scripted engine. F-03 to F-20, B-01, B-02, B-25."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engine_actor.messages import Submit
from serve_app.ingress import build_api
from serve_app.intake import Facts
from tests.serve.conftest import ApiMaker
from tests.serve.doubles import PieceTokenizer
from tests.serve.wire import chunks, joined

pytestmark = pytest.mark.anyio

TOKENIZER = PieceTokenizer(" EN", "D", "ab", "é")


def saying(*pieces: str | bytes, end: bool = True) -> Any:
    """A script: these pieces, then eos."""
    tokens = TOKENIZER.ids(*pieces) + ([TOKENIZER.eos] if end else [])
    return lambda submit: list(tokens)


async def both(api: Any, prompt: Any = "a", **body: Any) -> tuple[Any, str]:
    """(the whole answer's first choice, the joined stream), which must be the same text."""
    whole = await api.complete(prompt, **body)
    streamed = await api.complete(prompt, stream=True, **body)
    assert whole.status_code == streamed.status_code == 200
    choice = whole.json()["choices"][0]
    text = joined(streamed.text)
    assert text == choice["text"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks(streamed.text)]
    assert reasons[-1] == choice["finish_reason"]
    assert not any(reasons[:-1])
    return choice, text


async def test_b01_a_stop_string_over_tokens_is_never_sent(make_api: ApiMaker) -> None:
    """B-01, first run."""
    api = await make_api(TOKENIZER, saying("x", " EN", "D", "!", "y"))
    choice, text = await both(api, max_tokens=20, stop=["END!"])
    assert (text, choice["finish_reason"]) == ("x ", "stop")


async def test_b01_text_that_only_looked_like_a_stop_is_all_sent(make_api: ApiMaker) -> None:
    """B-01, second run."""
    api = await make_api(TOKENIZER, saying("x", " EN", "D", "?"))
    choice, text = await both(api, max_tokens=20, stop=["END!"])
    assert (text, choice["finish_reason"]) == ("x END?", "stop")
    cut = await api.complete("a", max_tokens=3, stop="END!")
    assert cut.json()["choices"][0]["text"] == "x END"
    assert cut.json()["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_may_stay_in_the_output(make_api: ApiMaker) -> None:
    """F-11."""
    api = await make_api(TOKENIZER, saying("x", " EN", "D", "!", "y"))
    choice, _ = await both(api, stop=["END!"], include_stop_str_in_output=True)
    assert choice["text"] == "x END!"


async def test_b02_no_half_character_leaves(make_api: ApiMaker) -> None:
    """B-02: every character over several tokens, and an end inside the last one."""
    data = [bytes([byte]) for byte in "你好🙂".encode()]
    api = await make_api(TOKENIZER, saying(*data))
    choice, _ = await both(api, max_tokens=50)
    assert (choice["text"], choice["finish_reason"]) == ("你好🙂", "stop")
    stream = await api.complete(stream=True, max_tokens=8)
    pieces = [c["choices"][0]["text"] for c in chunks(stream.text)]
    assert "".join(pieces) == "你好\ufffd"
    assert all("\ufffd" not in piece for piece in pieces[:-1])
    assert chunks(stream.text)[-1]["choices"][0]["finish_reason"] == "length"


async def test_b25_usage_only_where_asked(make_api: ApiMaker) -> None:
    """B-25."""
    api = await make_api(TOKENIZER, saying("x", "y"))
    plain = chunks((await api.complete("abc", stream=True)).text)
    assert all("usage" not in chunk and chunk["choices"] for chunk in plain)
    asked = await api.complete("abc", stream=True, stream_options={"include_usage": True})
    *body, last = chunks(asked.text)
    assert all(chunk["usage"] is None for chunk in body)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    whole = (await api.complete("abc")).json()
    assert whole["usage"] == last["usage"]
    refused = await api.complete(stream_options={"include_usage": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream_options"


async def test_usage_with_a_stop_string_counts_to_the_token_that_stopped(
    make_api: ApiMaker,
) -> None:
    """The same count whether batches were merged or not, cached tokens included."""
    for at_once in (1, 7):
        api = await make_api(
            TOKENIZER, saying("x", " EN", "D", "!", "y", "y", "y"), tokens_per_tick=at_once
        )
        usage = (await api.complete("ab", max_tokens=20, stop="END!")).json()["usage"]
        assert usage["completion_tokens"] == 4
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_continuous_usage(make_api: ApiMaker) -> None:
    """F-14."""
    api = await make_api(TOKENIZER, saying("x", "y"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await api.complete(stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(stream.text)]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    stream = await api.chat(stream=True, stream_options=options)
    opening, *_, last = chunks(stream.text)
    assert opening["choices"][0]["delta"]["role"] == "assistant"
    assert opening["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
    assert opening["usage"]["completion_tokens"] <= 1


@pytest.mark.parametrize("prompt", ["ab", ["ab"], TOKENIZER.ids("a", "b"), [TOKENIZER.ids("ab")]])
async def test_all_prompt_forms(make_api: ApiMaker, prompt: Any) -> None:
    """F-03."""
    api = await make_api(TOKENIZER, saying("x"))
    response = await api.complete(prompt, echo=True)
    assert response.json()["choices"][0]["text"] == "abx"


def echoing(submit: Submit) -> list[int]:
    """Says the prompt's last token, so that choices can be told apart."""
    return [submit.prompt_ids[-1], TOKENIZER.eos]


async def test_many_prompts_and_choices_are_numbered_in_order(make_api: ApiMaker) -> None:
    """F-03, F-05."""
    api = await make_api(TOKENIZER, echoing)
    whole = (await api.complete(["x", "y"], n=2)).json()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [
        (0, "x"), (1, "x"), (2, "y"), (3, "y"),
    ]  # fmt: skip
    assert whole["usage"]["prompt_tokens"] == 2
    assert whole["usage"]["completion_tokens"] == 8
    stream = (await api.complete(["x", "y"], n=2, stream=True)).text
    assert [joined(stream, index) for index in range(4)] == ["x", "x", "y", "y"]


async def test_best_of_keeps_the_best_by_mean_logprob(make_api: ApiMaker) -> None:
    """F-06. Byte 0 has a logprob of minus infinity in the double."""
    scripts = [[0, 0, 120], [0, 121], [122, 122]]

    def by_rid(submit: Submit) -> list[int]:
        return scripts[(submit.rid - 1) % 3]

    api = await make_api(TOKENIZER, by_rid)
    body = (await api.complete(n=2, best_of=3)).json()
    assert [c["text"] for c in body["choices"]] == ["zz", "\0y"]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 7


async def test_echo_with_logprobs_has_null_first(make_api: ApiMaker) -> None:
    """F-07, F-08: the shape that lm-eval reads."""
    api = await make_api(TOKENIZER, saying("x", "y"))
    choice, text = await both(api, "cab", echo=True, logprobs=1, max_tokens=1)
    logprobs = choice["logprobs"]
    assert text == "cabx"
    assert logprobs["tokens"] == ["c", "ab", "x"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 3]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][2] == {"x": -0.5}
    assert len(logprobs["top_logprobs"]) == 3


async def test_echo_alone_and_nothing_at_all(make_api: ApiMaker) -> None:
    """F-04, F-07: max_tokens 0."""
    api = await make_api(TOKENIZER, saying("x"))
    scored, _ = await both(api, "cab", echo=True, logprobs=0, max_tokens=0)
    assert scored["logprobs"]["token_logprobs"] == [None, -0.5]
    assert (scored["text"], scored["finish_reason"]) == ("cab", "length")
    before = len(api.service.received)
    plain, text = await both(api, "cab", echo=True, max_tokens=0)
    assert (text, plain["logprobs"]) == ("cab", None)
    empty, _ = await both(api, "cab", max_tokens=0)
    assert (empty["text"], empty["finish_reason"]) == ("", "length")
    assert not [m for m in api.service.received[before:] if isinstance(m, Submit)]


async def test_streamed_logprobs_are_those_of_the_whole_answer(make_api: ApiMaker) -> None:
    """F-08: nothing twice, nothing lost, offsets into the joined text, none behind a stop."""
    for at_once in (1, 3):
        api = await make_api(TOKENIZER, saying("x", " EN", "D", "é", "y"), tokens_per_tick=at_once)
        for stop in (["END!"], ["Dé"], ["\u00e9y"]):
            body = {"logprobs": 2, "stop": stop, "echo": True, "max_tokens": 20}
            whole = (await api.complete("cab", **body)).json()["choices"][0]["logprobs"]
            stream = await api.complete("cab", stream=True, **body)
            gathered: dict[str, list[Any]] = {key: [] for key in whole}
            for chunk in chunks(stream.text):
                for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
                    gathered[key] += values
            assert gathered == whole
            assert len({len(values) for values in whole.values()}) == 1


async def test_logprobs_of_minus_infinity_are_finite_json(make_api: ApiMaker) -> None:
    """F-08."""
    api = await make_api(TOKENIZER, lambda submit: [0, TOKENIZER.eos])
    body = (await api.complete(logprobs=5)).json()
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -0.5]


async def test_the_token_that_ended_a_text_is_counted_and_not_shown(make_api: ApiMaker) -> None:
    api = await make_api(TOKENIZER, saying("x", "y", "z"))
    body = (await api.complete(logprobs=0)).json()
    assert body["choices"][0]["text"] == "xyz"
    assert body["choices"][0]["logprobs"]["tokens"] == ["x", "y", "z", "<eos>"]
    assert body["usage"]["completion_tokens"] == 4


async def test_parameters_reach_the_engine(make_api: ApiMaker) -> None:
    """F-11, F-15 to F-20, F-47, F-55, F-76."""
    api = await make_api(TOKENIZER, saying("x"))
    headers = {"x-request-id": "mine-1", "x-request-timeout": "2"}
    parameters = {
        "prompt": "a", "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9,
        "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.1, "logit_bias": {"5": -3}, "seed": 11, "stop_token_ids": [4, 4],
        "ignore_eos": True, "priority": 3, "timeout": 5, "cache_salt": "s", "user": "u",
    }  # fmt: skip
    response = await api.client.post("/v1/completions", json=parameters, headers=headers)
    assert response.headers["x-request-id"] == "mine-1"
    submit = next(m for m in api.service.received if isinstance(m, Submit))
    sampling = submit.sampling
    for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"):
        assert getattr(sampling, name) == parameters[name]
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.logit_bias == ((5, -3.0),)
    assert sampling.stop_token_ids == (4,)
    assert sampling.ignore_eos
    assert (submit.priority, submit.deadline_ms, submit.salt) == (3, 2000, "s")
    assert submit.trace_id == "mine-1"
    await api.client.post("/v1/completions", json={**parameters, "request_id": "body-1"})
    assert api.service.received[-1].trace_id == "body-1"


async def test_every_answer_has_ids(make_api: ApiMaker) -> None:
    """F-39."""
    api = await make_api(TOKENIZER, saying("x"))
    first, second = await api.complete(), await api.complete()
    assert first.json()["id"] != second.json()["id"]
    assert first.json()["id"].startswith(f"cmpl-{api.link.client}-")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    for bad in ("a b", "é", "x" * 129):
        response = await api.client.get("/health", headers={"x-request-id": bad.encode()})
        assert response.headers["x-request-id"].startswith("req-")


async def test_a_server_that_names_requests_itself_is_left_to_it(make_api: ApiMaker) -> None:
    """Ray Serve puts the header into every answer: it would stand there twice."""
    api = await make_api(TOKENIZER, saying("x"))
    app = build_api(api.links, TOKENIZER, Facts(attach_wait_s=0), adds_id=False)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        sent = {"prompt": "a", "max_tokens": 1}
        headers = {"x-request-id": "mine-2"}
        response = await client.post("/v1/completions", json=sent, headers=headers)
    assert response.status_code == 200
    assert "x-request-id" not in response.headers
    assert api.service.received[-1].trace_id == "mine-2"


async def test_unknown_parameters_are_ignored_and_said(make_api: ApiMaker) -> None:
    """F-22."""
    api = await make_api(TOKENIZER, saying("x"))
    for stream in (False, True):
        response = await api.complete(wibble=1, stream=stream)
        assert response.headers["x-warnings"] == "ignored unknown parameters: wibble"
    assert "x-warnings" not in (await api.complete()).headers
    refused = await api.complete(suffix="x")
    assert refused.json()["error"]["code"] == "unsupported_parameter"
    warned = await make_api(TOKENIZER, saying("x"), http={"unsupported": "warn"})
    response = await warned.complete(suffix="x")
    assert response.headers["x-warnings"] == "ignored unsupported parameters: suffix"
    inner = await api.complete(stream=True, stream_options={"include_usage": True, "odd": 1})
    assert inner.headers["x-warnings"] == "ignored unknown parameters: stream_options.odd"
