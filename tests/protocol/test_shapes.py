"""Bodies and events, byte by byte. B-25, F-08, F-38."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from engine_actor.core.params import InvalidParam
from engine_actor.core.plan import TokenLogprobs
from serve_app.protocol import logprobs
from serve_app.protocol.errors import KINDS, ApiError, from_invalid_param
from serve_app.protocol.logprobs import TokenEntry
from serve_app.protocol.models import ServedModel, model_list
from serve_app.protocol.shapes import (
    ChatShape,
    ChoiceDelta,
    ChoiceResult,
    CompletionShape,
    Envelope,
    error_event,
)
from serve_app.protocol.usage import UsageTotals
from serve_app.public_id import format_public_id, parse_public_id


class Names:
    """Token n prints as the letter n."""

    def token_text(self, token: int, /) -> str:
        return chr(token)

    def token_bytes(self, token: int, /) -> bytes:
        return chr(token).encode()


A, B = ord("a"), ord("b")
ENTRIES = (
    TokenEntry(A, 0, None),
    TokenEntry(B, 1, TokenLogprobs(B, -1.0, ((A, -0.5), (B, -1.0)))),
    TokenEntry(B, 2, TokenLogprobs(B, float("-inf"), ((A, -0.5), (A, -3.0)))),
)
USAGE = UsageTotals(7, 3, 4)
USAGE_BODY = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def envelope(**changes: Any) -> Envelope:
    return Envelope(**{"public_id": "i", "created": 5, "model": "m", "n_choices": 2, **changes})


def payload(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert b"\n" not in event[6:-2]
    return json.loads(event[6:])


def test_completion_event_golden() -> None:
    shape = CompletionShape(envelope(), Names())
    assert shape.opening(None) == b""
    assert (
        shape.event(ChoiceDelta(1, 'é"\n'), None)
        == (
            'data: {"id":"i","object":"text_completion","created":5,"model":"m",'
            '"choices":[{"index":1,"text":"é\\"\\n","logprobs":null,"finish_reason":null}]}\n\n'
        ).encode()
    )


def test_usage_is_null_in_every_chunk_and_totals_in_the_last() -> None:
    """B-25."""
    shape = CompletionShape(envelope(include_usage=True), Names())
    chunk = payload(shape.event(ChoiceDelta(0, "x", (), "stop"), None))
    assert chunk["usage"] is None
    assert chunk["choices"][0]["finish_reason"] == "stop"
    last = payload(shape.usage_event(USAGE))
    assert last["choices"] == []
    assert last["usage"] == USAGE_BODY
    assert payload(shape.event(ChoiceDelta(0, "x"), USAGE))["usage"] == USAGE_BODY
    plain = payload(CompletionShape(envelope(), Names()).event(ChoiceDelta(0, "x"), None))
    assert "usage" not in plain


def test_legacy_logprobs_golden() -> None:
    """The first echoed token's logprob is null; minus infinity is a finite number."""
    assert logprobs.legacy(ENTRIES, 2, Names().token_text) == {
        "tokens": ["a", "b", "b"],
        "token_logprobs": [None, -1.0, -9999.0],
        "top_logprobs": [None, {"a": -0.5, "b": -1.0}, {"a": -0.5, "b": -9999.0}],
        "text_offset": [0, 1, 2],
    }
    assert logprobs.legacy(ENTRIES[1:2], 0, Names().token_text)["top_logprobs"] == [{"b": -1.0}]


def test_chat_logprobs_golden() -> None:
    body = logprobs.chat(ENTRIES[1:2], 1, Names().token_text, Names().token_bytes)
    assert body == {
        "content": [
            {
                "token": "b",
                "logprob": -1.0,
                "bytes": [98],
                "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
            }
        ],
        "refusal": None,
    }


def test_mean_logprob_ranks() -> None:
    assert logprobs.mean(ENTRIES[:2]) == -1.0
    assert logprobs.mean(()) == logprobs.LOWEST


def test_completion_answer_golden() -> None:
    shape = CompletionShape(envelope(logprobs=0), Names())
    assert shape.whole([ChoiceResult(0, "b", "length", ENTRIES[1:2])], USAGE) == {
        "id": "i",
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "b",
                "logprobs": {
                    "tokens": ["b"],
                    "token_logprobs": [-1.0],
                    "top_logprobs": [{"b": -1.0}],
                    "text_offset": [1],
                },
                "finish_reason": "length",
            }
        ],
        "usage": USAGE_BODY,
    }


def test_chat_events_golden() -> None:
    shape = ChatShape(envelope(), Names())
    roles = [payload(e + b"\n\n") for e in shape.opening(None).split(b"\n\n") if e]
    assert [c["choices"][0]["index"] for c in roles] == [0, 1]
    assert roles[0]["object"] == "chat.completion.chunk"
    assert roles[0]["choices"][0]["delta"]["role"] == "assistant"
    assert payload(shape.event(ChoiceDelta(1, "hi"), None))["choices"] == [
        {"index": 1, "delta": {"content": "hi"}, "logprobs": None, "finish_reason": None}
    ]
    assert payload(shape.event(ChoiceDelta(1, "", (), "length"), None))["choices"] == [
        {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "length"}
    ]


def test_chat_answer_golden() -> None:
    body = ChatShape(envelope(), Names()).whole([ChoiceResult(0, "b", "stop")], USAGE)
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "b", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("out_of_memory", 503, True),
        ("overloaded", 429, True),
        ("unavailable", 503, True),
        ("engine_restarted", 503, True),
        ("deadline_exceeded", 408, False),
        ("context_length_exceeded", 400, False),
    ],
)
def test_error_table(code: str, status: int, retry: bool) -> None:
    """decisions.md section 5, as a table."""
    error = ApiError(code)
    assert error.status == status
    assert ("retry-after" in error.headers()) is retry
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    assert error.body()["error"]["code"] == code


def test_an_unknown_code_tells_nothing() -> None:
    error = ApiError("CUDA_ERROR at /secret/path", "stack trace")
    assert (error.status, error.code) == (500, "internal_error")
    assert "secret" not in json.dumps(error.body())
    assert "stack" not in json.dumps(error.body())


def test_errors_cross_a_process_whole() -> None:
    for code in KINDS:
        copy = pickle.loads(pickle.dumps(ApiError(code, "text", "n")))
        assert (copy.code, copy.message, copy.param) == (code, "text", "n")


def test_engine_death_is_unavailable_before_the_first_byte() -> None:
    assert ApiError("engine_restarted").before_first_byte().code == "unavailable"
    assert ApiError("out_of_memory").before_first_byte().code == "out_of_memory"


def test_error_events_are_ascii() -> None:
    event = error_event(ApiError("invalid_value", "é\ud800").body())
    assert payload(event)["error"]["message"] == "é\ud800"
    assert event.isascii()


def test_a_refused_sampling_parameter_keeps_its_name() -> None:
    error = from_invalid_param(InvalidParam("top_p", "must be in (0, 1], got 0"))
    assert (error.param, error.message) == ("top_p", "top_p: must be in (0, 1], got 0")


def test_model_list_golden() -> None:
    body = model_list([ServedModel("m", 5, 512, 1024, 1000, {"bits": 4})])
    assert body == {
        "object": "list",
        "data": [
            {
                "id": "m",
                "object": "model",
                "created": 5,
                "owned_by": "deepinfer-sm86",
                "max_model_len": 512,
                "meta": {"vocab_size": 1000, "kv_tokens": 1024, "bits": 4},
            }
        ],
    }


def test_public_ids_carry_their_owner() -> None:
    text = format_public_id("cmpl", "ab12", range(255, 259))
    assert text == "cmpl-ab12-ff-4"
    assert parse_public_id(text) == ("ab12", range(255, 259))
    assert parse_public_id("chat" + text) == ("ab12", range(255, 259))
    for bad in (
        None,
        5,
        "",
        "cmpl-ab12-ff",
        "cmpl-ab12-ff-0",
        "cmpl-ab12-ff-ffffffff",
        "x-ab12-ff-4",
    ):
        assert parse_public_id(bad) is None
    assert parse_public_id("cmpl-a-ffffffff-2") is None
