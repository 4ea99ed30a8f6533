"""Reading in steps gives json.loads's own values and errors, and ends early where it may."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.protocol import large_json
from serve_app.protocol.bodies import LARGE, parse_object
from serve_app.protocol.bounds import MAX_ENTRIES, MAX_IDS
from serve_app.protocol.errors import ApiError
from serve_app.protocol.large_json import MAX_INNER, SteppingDecoder

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=40,
)


class Constant(ValueError):
    """NaN or Infinity was met."""


def refuse(name: str) -> NoReturn:
    raise Constant(name)


def read(text: str, **options: Any) -> Any:
    """The value, or the error's text."""
    try:
        return json.loads(text, parse_constant=refuse, **options)
    except ValueError as error:
        return str(error)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of eight characters, so that a small text has many."""
    monkeypatch.setattr(large_json, "RUN", 8)
    monkeypatch.setattr(large_json, "_FLAT", re.compile(r'[^\[\]{}"]{0,8}'))


@settings(max_examples=100, deadline=None)
@given(value=VALUES, indent=st.none() | st.integers(0, 2), data=st.data())
def test_equal_to_json_s_own(value: Any, indent: int | None, data: st.DataObject) -> None:
    """Also where a character is lost, doubled or another: the same error at the same place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "RUN", 8)
        patch.setattr(large_json, "_FLAT", re.compile(r'[^\[\]{}"]{0,8}'))
        text = json.dumps(value, indent=indent, ensure_ascii=False)
        assert read(text, cls=SteppingDecoder) == value
        at = data.draw(st.integers(0, len(text)))
        put = data.draw(st.sampled_from(["", ",", "]", "[", "}", '"', ":", "NaN", "-", " ", "1"]))
        broken = text[:at] + put + text[at + data.draw(st.integers(0, 1)) :]
        assert read(broken, cls=SteppingDecoder) == read(broken)


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize(
    "text",
    [
        "[1,2,3,4,5,6,7,8,9,10,]",
        "[1,2,3,4,5,6,7,8,9,10,        ]",
        "[1,2,3,4,5,6,7,,8,9,10]",
        "[1,2,3,4,5,6,7,8,9,10",
        "[          ]",
        "[          ,1]",
        "[1,2,3,4,5,6,7,NaN,9,10]",
        "[1234567890123456789,2,3]",
        "[1,2,3,4,5,6,[7],8,9,10,]",
        '[1,2,3,4,5,6,7,8,"9",]',
        "\ufeff[1]",
        "[" + "1" * 5000 + "]",
    ],
)
def test_ends_of_runs(text: str) -> None:
    assert read(text, cls=SteppingDecoder) == read(text)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("prompt", "1," * MAX_IDS + "1", f"prompt: has more than {MAX_IDS} entries"),
        ("messages", '"",' * 32768 + '""', "messages: has more than 32768 entries"),
        ("other", "[]," * MAX_INNER + "[]", f"other: has more than {MAX_INNER} lists and objects"),
    ],
)
def test_what_no_request_may_hold_ends_the_reading(name: str, value: str, why: str) -> None:
    """By name, and before the rest of the text is looked at."""
    with pytest.raises(ApiError) as caught:
        parse_object(f'{{"n": 1, "{name}": [{value}], rubbish'.encode())
    assert (caught.value.status, caught.value.param) == (400, name)
    assert caught.value.message == why


def test_too_many_parameters() -> None:
    names = ",".join(f'"name {index}":0' for index in range(MAX_ENTRIES + 1))
    with pytest.raises(ApiError, match=f"more than {MAX_ENTRIES} parameters"):
        parse_object(f"{{{names}}}".encode())


def test_all_that_a_request_may_hold_is_read() -> None:
    body = {
        "prompt": list(range(MAX_IDS)),
        "stop": ["a"] * MAX_ENTRIES,
        "unknown": [[]] * (MAX_INNER - 1),
        "text": "é" * LARGE,
    }
    assert parse_object(json.dumps(body).encode()) == body


def test_errors_of_a_large_body_read_as_those_of_a_small_one() -> None:
    filling = " " * LARGE
    for text, why in (
        (f'{{"a": 1{filling}', "Expecting ',' delimiter"),
        (f'{{"a": NaN{filling}}}', "NaN is not a JSON number"),
        (f'{{"a": {"[" * LARGE}', "nested too deeply"),
        (f'{{"a": {"1" * LARGE}}}', "a number that is too long"),
        (f"[1]{filling}", "must be a JSON object"),
        (f"[{'1,' * 2 * MAX_IDS}1]", "must be a JSON object"),
    ):
        with pytest.raises(ApiError, match=why) as caught:
            parse_object(text.encode())
        assert caught.value.code == "invalid_json"
