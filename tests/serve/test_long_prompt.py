"""A prompt far beyond the context is refused after a bounded look at it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.long_prompt import TextTooLong, encode_at_most
from tests.doubles.tiny_tokenizers import byte_level
from tests.serve.conftest import ApiMaker
from tests.serve.doubles import PieceTokenizer

pytestmark = pytest.mark.anyio


class Counting:
    """`width` characters a token; remembers how much it was given."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.seen = 0

    def __call__(self, text: str) -> list[int]:
        self.seen += len(text)
        return [0] * -(-len(text) // self.width)


@pytest.mark.parametrize(("width", "most"), [(1, 800), (5, 4000), (64, 68_000)])
def test_the_work_does_not_grow_with_the_text(width: int, most: int) -> None:
    """Characters looked at for a limit of 100 tokens, whatever is sent."""
    encode = Counting(width)
    with pytest.raises(TextTooLong):
        encode_at_most(encode, "x" * 10_000_000, 100)
    assert encode.seen <= most


def test_what_fits_is_encoded_once() -> None:
    encode = Counting(1)
    assert len(encode_at_most(encode, "x" * 100, 100)) == 100
    assert encode.seen == 100
    dense = Counting(64)
    assert len(encode_at_most(dense, "x" * 6400, 100)) == 100
    assert dense.seen == 800 + 3200 + 6400


@given(text=st.text(alphabet="the and é🙂\n", max_size=400), limit=st.integers(1, 60))
def test_never_refused_where_it_fits(text: str, limit: int) -> None:
    """A real byte-level tokenizer, cuts anywhere: inside words and merges."""
    tokenizer = byte_level()

    def encode(part: str) -> list[int]:
        ids: list[int] = tokenizer.encode(part).ids
        return ids

    whole = encode(text)
    try:
        assert encode_at_most(encode, text, limit) == whole
    except TextTooLong:
        assert len(whole) > limit


async def test_both_endpoints_name_the_parameter(make_api: ApiMaker) -> None:
    """B-08: 400 with the limit; megabytes are not tokenised, the next request is served."""
    tokenizer = PieceTokenizer()
    api = await make_api(tokenizer, lambda submit: [120, tokenizer.eos])
    limit = api.link.attached.max_model_len
    text = "x" * 3_000_000
    for response, param in (
        (await api.complete(text), "prompt"),
        (await api.complete(["a", text]), "prompt"),
        (await api.chat(text), "messages"),
        (await api.chat([{"type": "text", "text": text}]), "messages"),
    ):
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert f"more than {limit} tokens" in error["message"]
    ids = await api.complete([[5], [97] * (limit + 1)], max_tokens=0)
    assert (ids.status_code, ids.json()["error"]["param"]) == (400, "prompt")
    assert ids.json()["error"]["code"] == "context_length_exceeded"
    assert (await api.complete("a")).json()["choices"][0]["text"] == "x"
