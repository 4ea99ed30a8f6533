"""Request bodies at the door: types, ranges, forms. F-03, F-22, B-14, B-23, B-28."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.protocol.bodies import parse_model, parse_object, timeout_from_header
from serve_app.protocol.chat import ChatRequest
from serve_app.protocol.completions import CompletionRequest
from serve_app.protocol.convert import completion_job
from serve_app.protocol.errors import KINDS, ApiError
from serve_app.protocol.job import EncodedPrompt
from serve_app.protocol.models import ServedModel


def refused(body: dict[str, Any], kind: Any = CompletionRequest) -> tuple[str, str | None]:
    with pytest.raises(ApiError) as caught:
        parse_model(kind, body)
    assert caught.value.status == 400
    return caught.value.code, caught.value.param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "bc"], ("a", "bc")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompt_has_four_forms(prompt: Any, expected: Any) -> None:
    """F-03."""
    assert parse_model(CompletionRequest, {"prompt": prompt}).prompts() == expected


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, "", 3, {}, [], [""], [[]], [[1], []], [1, "a"], ["a", 1], [["a"]], [[[1]]]),
        *([True], [1.0], [[1.5]], [{}], [None], ["a"] * 1025),
    ],
)
def test_other_prompts_are_refused_by_name(prompt: Any) -> None:
    """F-03: empty and mixed prompts."""
    assert refused({"prompt": prompt})[1] == "prompt"


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("n", 0),
        ("n", "2"),
        ("n", 2.0),
        ("n", True),
        ("n", 129),
        ("n", 10**400),
        ("best_of", 0),
        ("max_tokens", -1),
        ("max_tokens", "16"),
        ("logprobs", True),
        ("logprobs", -1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("inf")),
        ("top_p", []),
        ("top_k", -2),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", []),
        ("stream_options", {"include_usage": 1}),
        ("stop", ["a"] * 5),
        ("stop", [""]),
        ("stop", ""),
        ("stop", 1),
        ("stop", [1]),
        ("stop_token_ids", 7),
        ("stop_token_ids", [True]),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"\u0661": 1}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", [1]),
        ("seed", 1.5),
        ("priority", 2**31),
        ("timeout", 0),
        ("timeout", -1.0),
        ("echo", "yes"),
        ("model", 7),
        ("user", 7),
        ("cache_salt", "x" * 513),
    ],
)
def test_wrong_types_and_ranges_name_their_parameter(parameter: str, value: Any) -> None:
    """B-28: strict types, and `param` is the public name."""
    code, param = refused({"prompt": "a", parameter: value})
    assert param == parameter
    assert code in ("invalid_type", "invalid_value")


def test_null_means_absent() -> None:
    names = [name for name in CompletionRequest.model_fields if name != "prompt"]
    request = parse_model(CompletionRequest, {"prompt": "a", **dict.fromkeys(names)})
    assert request == parse_model(CompletionRequest, {"prompt": "a"})


def test_a_missing_prompt_is_said_so() -> None:
    assert refused({}) == ("missing_required_parameter", "prompt")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [1],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_bad_messages_name_messages(messages: Any) -> None:
    assert refused({"messages": messages}, ChatRequest)[1] == "messages"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "a"}, "messages of tools"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}, "tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]}, "tool_calls"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content of type image_url"),
        ({"role": "assistant", "content": "x", "prefix": True}, "prefix"),
    ],
)
def test_a_message_that_others_serve_is_refused_by_what_it_holds(
    message: dict[str, Any], named: str
) -> None:
    """Neither in words about strings, nor dropped in silence."""
    with pytest.raises(ApiError, match=f"{named}.* not supported by this server") as caught:
        parse_model(ChatRequest, {"messages": [{"role": "user", "content": "x"}, message]})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "messages")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": 5}, "prompt: Input should be a valid string or list"),
        ({"prompt": "a", "stop": 5}, "stop: Input should be a valid string or list"),
        ({"prompt": "a", "stop": [5]}, "stop: Input should be a valid string"),
        ({"prompt": "a", "n": "2"}, "n: Input should be a valid integer"),
        ({"content": 5}, "messages: Input should be a valid string or list"),
        ({"content": [5]}, "messages: Input should be an object"),
        ({"content": [{"type": "text"}]}, "text is required in messages"),
        ({"content": [{"type": "x", "text": "a"}]}, "messages: Input should be 'text'"),
    ],
)
def test_a_refusal_says_what_would_do(body: dict[str, Any], message: str) -> None:
    """Where a text or a list would, the one that the caller was about to send is spoken of."""
    kind: Any = CompletionRequest
    if "content" in body:
        kind, body = ChatRequest, {"messages": [{"role": "user", **body}]}
    with pytest.raises(ApiError) as caught:
        parse_model(kind, body)
    assert caught.value.message == message


def test_an_empty_list_of_tool_calls_says_nothing() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [], "audio": None}
    request = parse_model(ChatRequest, {"messages": [message]})
    assert request.messages[0].content == "x"


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"hello", "invalid_json", None),
        (b"[1]", "invalid_json", None),
        (b'"x"', "invalid_json", None),
        (b'{"a":NaN}', "invalid_json", None),
        (b'{"a":-Infinity}', "invalid_json", None),
        (b'{"a":' + b"9" * 5000 + b"}", "invalid_json", None),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "invalid_json", None),
        (b'{"a":"\xff"}', "invalid_json", None),
        (b'{"prompt":"\xed\xa0\x80"}', "invalid_json", None),
        (b'{"prompt":"\\ud800"}', "invalid_value", "prompt"),
        (b'{"prompt":["ok","\\udc00x"]}', "invalid_value", "prompt"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "invalid_value", "messages"),
        (b'{"\\ud800":1}', "invalid_value", None),
    ],
)
def test_bodies_that_are_no_json_object(raw: bytes, code: str, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(raw)
    assert (caught.value.code, caught.value.param) == (code, param)
    json.dumps(caught.value.body()).encode()


def test_good_bodies_pass() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a":"\\ud83d\\ude00"}') == {"a": "😀"}
    assert parse_object(b'{"a":1,"a":2}') == {"a": 2}


@pytest.mark.parametrize("value", ["", "abc", "0", "-1", "nan", "inf", "1e6", "1e306", "1_0"])
def test_a_bad_timeout_header_is_refused(value: str) -> None:
    with pytest.raises(ApiError):
        timeout_from_header(value)
    assert timeout_from_header("1.5") == 1.5
    assert timeout_from_header(None) is None


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 1e308, 5e-324])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(sorted(CompletionRequest.model_fields)), json_values))
def test_any_json_is_taken_or_refused_with_a_known_code(body: dict[str, Any]) -> None:
    """Whatever comes, the answer is a request or a 400 that can be encoded; never anything else."""
    refusal: ApiError | None = None
    try:
        request = parse_model(CompletionRequest, {"prompt": "a", **body})
        served = ServedModel("m", 1, max_model_len=64, kv_tokens=64, vocab_size=99)
        completion_job(request, [EncodedPrompt((1, 2), "a")], served, max_logprobs=5)
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.code in KINDS
        assert refusal.status == (404 if refusal.code == "model_not_found" else 400)
        assert refusal.param in body
        assert len(refusal.message) < 1000
        json.dumps(refusal.body()).encode()
