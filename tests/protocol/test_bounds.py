"""A body within the size limit, full of small wrong things: refused before each is looked at."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from serve_app.protocol.bodies import parse_model
from serve_app.protocol.bounds import MAX_ENTRIES, MAX_IDS
from serve_app.protocol.chat import MAX_MESSAGES, ChatRequest
from serve_app.protocol.completions import CompletionRequest
from serve_app.protocol.errors import ApiError
from serve_app.protocol.tokens import MAX_TEXT, DetokenizeRequest, TokenizeRequest

MANY = 300_000
PART = {"type": "text", "text": "x"}


class Untouchable(list[Any]):
    """A list whose entries nobody may look at."""

    def __iter__(self) -> Any:
        raise AssertionError("somebody walks over the entries")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (CompletionRequest, "prompt", Untouchable([1] * (MAX_IDS + 1))),
        (CompletionRequest, "prompt", [[1]] * (MAX_IDS // 2 + 1)),
        (CompletionRequest, "prompt", [[1, 2], Untouchable([1] * MAX_IDS)]),
        (CompletionRequest, "stop_token_ids", Untouchable([""] * MANY)),
        (CompletionRequest, "logit_bias", {str(index): "" for index in range(MANY)}),
        (CompletionRequest, "stop", Untouchable([1] * MANY)),
        (CompletionRequest, "stream_options", {str(index): 1 for index in range(MANY)}),
        (ChatRequest, "messages", Untouchable([1] * MANY)),
        (ChatRequest, "messages", [{"role": "user", "content": Untouchable([1] * MANY)}]),
        (DetokenizeRequest, "tokens", Untouchable([""] * (MAX_IDS + 1))),
    ],
)
def test_too_many_entries_are_refused_by_name(kind: type[BaseModel], name: str, value: Any) -> None:
    """Validation alone took 40 s and 4 GB for 16 MB of wrong stop ids."""
    body: dict[str, Any] = {"prompt": "a"} if kind is CompletionRequest else {}
    with pytest.raises(ApiError, match="more than") as caught:
        parse_model(kind, {**body, name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


def test_what_stays_within_the_bounds_is_taken() -> None:
    message = {"role": "user", "name": "n", "content": [PART]}
    chat = parse_model(ChatRequest, {"messages": [message] * MAX_MESSAGES})
    assert len(chat.messages) == MAX_MESSAGES
    bias = {str(index): 1 for index in range(MAX_ENTRIES)}
    request = parse_model(CompletionRequest, {"prompt": [1] * MAX_IDS, "logit_bias": bias})
    assert len(request.prompts()[0]) == MAX_IDS
    assert parse_model(DetokenizeRequest, {"tokens": []}).tokens == []
    assert parse_model(CompletionRequest, {"prompt": "a", "unknown": [[]] * MANY}).prompt == "a"


def test_a_text_to_count_is_bounded() -> None:
    assert parse_model(TokenizeRequest, {"prompt": "a" * MAX_TEXT}).prompt is not None
    with pytest.raises(ApiError, match="at most 1048576 characters") as caught:
        parse_model(TokenizeRequest, {"prompt": "a" * (MAX_TEXT + 1)})
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("tokens", [["1"], [1, None], [True], [1.0], "1"])
def test_ids_to_decode_are_integers(tokens: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse_model(DetokenizeRequest, {"tokens": tokens})
    assert (caught.value.status, caught.value.param) == (400, "tokens")
