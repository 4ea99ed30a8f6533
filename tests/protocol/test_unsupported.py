"""F-22: known but unsupported is refused or warned of, unknown is ignored and said so."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.protocol.chat import ChatRequest
from serve_app.protocol.completions import CompletionRequest
from serve_app.protocol.errors import ApiError
from serve_app.protocol.unsupported import (
    CHAT,
    COMPLETIONS,
    HARMLESS,
    refuse_unsupported,
    unknown_parameters,
    warning_header,
)


@pytest.mark.parametrize(
    ("table", "name", "value"),
    [
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "bad_words", ["x"]),
        (COMPLETIONS, "use_beam_search", True),
        (COMPLETIONS, "skip_special_tokens", False),
        (COMPLETIONS, "return_token_ids", 1),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "store", True),
    ],
)
def test_a_used_unsupported_parameter_is_refused(table: Any, name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        refuse_unsupported({name: value}, table, refuse=True)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert refuse_unsupported({name: value}, table, refuse=False) == [name]


@pytest.mark.parametrize("table", [COMPLETIONS, CHAT])
def test_every_neutral_value_passes(table: dict[str, tuple[Any, ...]]) -> None:
    for name, values in table.items():
        for value in values:
            assert refuse_unsupported({name: value}, table, refuse=True) == []


@pytest.mark.parametrize(("kind", "table"), [(CompletionRequest, COMPLETIONS), (ChatRequest, CHAT)])
def test_no_parameter_is_both_supported_and_not(kind: Any, table: Any) -> None:
    assert not set(kind.model_fields) & set(table)
    assert not HARMLESS & set(table)


def test_unknown_names_become_a_header_that_cannot_be_forged() -> None:
    body = {"prompt": "a", "foo": 1, "x\r\nset-cookie: y": 2, "bar": 3, "metadata": {}}
    unknown = unknown_parameters(body, CompletionRequest.model_fields, COMPLETIONS)
    assert unknown == ["foo", "x\r\nset-cookie: y", "bar"]
    header = warning_header(["suffix"], unknown)
    assert header == (
        "ignored unsupported parameters: suffix; ignored unknown parameters: foo, bar, 1 more"
    )
    assert warning_header([], []) is None
