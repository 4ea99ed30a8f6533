"""The text of one choice: detokenising and stop strings together, over any split of the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.load.tokenizer import Tokenizer
from serve_app.text import TextStream
from tests.doubles.tiny_tokenizers import ALL, IM_END, IM_START


class _Pieces:
    """A scripted tokenizer: id n is the n-th of the given byte pieces."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return b"".join(self.pieces[token] for token in ids).decode("utf-8", "replace")


def _stream(tokenizer: _Pieces, ids: Sequence[int], stops: Sequence[str] = ()) -> list[str]:
    stream = TextStream(tokenizer, (), stops)
    return [*(stream.add([token]).text for token in ids), stream.finish().text]


def test_stop_string_over_tokens() -> None:
    """B-01, run 1: text "x ", the stop string is named, and the token behind it is not taken."""
    tokenizer = _Pieces("x", " EN", "D", "!", "y")
    stream = TextStream(tokenizer, (), ["END!"])
    deltas = [stream.add([token]) for token in range(5)]
    assert [delta.text for delta in deltas] == ["x", " ", "", "", ""]
    assert [delta.stopped for delta in deltas] == [None, None, None, "END!", None]
    assert stream.stopped == "END!"
    assert stream.finish().text == ""
    whole = TextStream(tokenizer, (), ["END!"]).add(range(5))
    assert (whole.text, whole.stopped, whole.consumed) == ("x ", "END!", 4)


def test_text_that_only_looked_like_a_stop_string() -> None:
    """B-01, run 2: nothing is lost, and it comes as soon as it cannot be the stop string."""
    tokenizer = _Pieces("x", " EN", "D", "?")
    assert _stream(tokenizer, range(4), ["END!"]) == ["x", " ", "", "END?", ""]
    assert _stream(tokenizer, range(3), ["END!"]) == ["x", " ", "", "END"]


def test_no_half_characters() -> None:
    """B-02: each character over several tokens; cut inside the emoji, one U+FFFD at the end."""
    data = "你好🙂".encode()
    tokenizer = _Pieces(*(data[index : index + 1] for index in range(len(data))))
    assert [text for text in _stream(tokenizer, range(10)) if text] == ["你", "好", "🙂"]
    for cut in (7, 8, 9):
        assert _stream(tokenizer, range(cut))[-1] == "\ufffd"
        assert "".join(_stream(tokenizer, range(cut))) == "你好\ufffd"


def test_a_stop_string_inside_what_is_flushed() -> None:
    """Text that only the end releases can still hold the stop string."""
    stream = TextStream(_Pieces("a", b"\xf0"), (), ["\ufffd"])
    assert stream.add([0, 1]).text == "a"
    last = stream.finish()
    assert (last.text, last.stopped) == ("", "\ufffd")


def test_offsets_for_logprobs() -> None:
    """`decoded` before a token is where its text begins; held text counts."""
    stream = TextStream(_Pieces("ab", "E", b"\xf0\x9f", b"\x99\x82", "z"), (), ["EX"])
    offsets = []
    for token in range(5):
        offsets.append(stream.decoded)
        stream.add([token])
    assert offsets == [0, 2, 3, 3, 4]
    assert stream.decoded == 5


def test_included_stop_string() -> None:
    """include_stop_str_in_output: the text ends with the stop string, nothing is held."""
    stream = TextStream(_Pieces("x", " EN", "D!y"), (), ["END!"], include_stop=True)
    assert stream.add([0, 1]).text == "x EN"
    assert stream.held == 0
    delta = stream.add([2])
    assert (delta.text, delta.stopped) == ("D!", "END!")


def test_stop_strings_wait_for_min_tokens() -> None:
    """A stop string among the first min_tokens ids does not end the text; a later one does."""
    stream = TextStream(_Pieces("a", "!", "b"), (), ["!"], min_tokens=2)
    assert stream.add([0, 1]).text == "a!"
    delta = stream.add([2, 1, 0])
    assert (delta.text, delta.stopped, delta.consumed) == ("b", "!", 2)


def test_a_stop_string_across_the_end_of_min_tokens() -> None:
    """It is complete after them, so it counts, and its beginning has not been sent."""
    stream = TextStream(_Pieces("x", " EN", "D!y"), (), ["END!"], min_tokens=2)
    assert stream.add([0, 1]).text == "x "
    delta = stream.add([2])
    assert (delta.text, delta.stopped) == ("", "END!")
    passed = TextStream(_Pieces("x", "EN", "D!", "y"), (), ["END!", "!yz"], min_tokens=3)
    assert passed.add([0, 1, 2]).text == "xEND"
    assert (passed.add([3]).text, passed.finish().text) == ("", "!y")


@given(
    pieces=st.lists(st.text(alphabet="abA", max_size=4), min_size=1, max_size=10),
    stops=st.lists(st.text(alphabet="abA", min_size=1, max_size=4), min_size=1, max_size=4),
    min_tokens=st.integers(0, 10),
    step=st.integers(1, 10),
    include=st.booleans(),
)
def test_min_tokens_by_the_rule(
    pieces: list[str], stops: list[str], min_tokens: int, step: int, include: bool
) -> None:
    """The rule, said plainly: grow the text by one character until it ends with a stop string, and
    look only at characters of tokens after the first min_tokens.
    """
    stream = TextStream(_Pieces(*pieces), (), stops, include_stop=include, min_tokens=min_tokens)
    ids, sent = list(range(len(pieces))), ""
    for start in range(0, len(ids), step):
        sent += stream.add(ids[start : start + step]).text
    sent += stream.finish().text
    whole = "".join(pieces)
    for end in range(len("".join(pieces[:min_tokens])) + 1, len(whole) + 1):
        met = [stop for stop in stops if whole[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            kept = whole[: end if include else end - len(stop)]
            assert (sent, stream.stopped) == (kept, stop)
            return
    assert (sent, stream.stopped) == (whole, None)


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    """Chat markers have no text; skip_special=False writes them."""
    tokenizer = Tokenizer(ALL["byte_level"]())
    ids = [IM_START, *tokenizer.encode("hi"), IM_END]
    assert TextStream(tokenizer).add(ids).text == "hi"
    shown = TextStream(tokenizer, skip_special=False).add(ids).text
    assert shown == "<|im_start|>hi<|im_end|>"


def test_text_continues_the_prompt() -> None:
    """B-04: behind a prompt a sentencepiece word keeps its leading space."""
    tokenizer = Tokenizer(ALL["llama_like"]())
    prompt, word = tokenizer.encode("the"), tokenizer.encode("Paris")
    assert TextStream(tokenizer, prompt).add(word).text == " Paris"
    assert TextStream(tokenizer).add(word).text == "Paris"


@pytest.mark.parametrize("kind", sorted(ALL))
@settings(max_examples=120)
@given(
    text=st.text(alphabet="aAé🙂好 END!\n", max_size=30),
    stops=st.lists(st.text(alphabet="aAé🙂EN!", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    include=st.booleans(),
)
def test_any_split_gives_the_same_text(
    kind: str, text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """B-01: one by one, in any pieces, and all at once: same text, same stop, same tokens taken."""
    tokenizer = Tokenizer(ALL[kind]())
    ids = tokenizer.encode(text, add_special_tokens=False)
    results = []
    for edges in (range(len(ids) + 1), sorted({0, len(ids), *cuts}), (0, len(ids))):
        stream = TextStream(tokenizer, (), stops, include_stop=include)
        taken, sent = 0, ""
        for start, end in zip(edges, list(edges)[1:], strict=False):
            if stream.stopped is None:
                delta = stream.add(ids[start:end])
                taken += delta.consumed
                sent += delta.text
                assert stream.held < max(map(len, stops), default=1)
        results.append((sent + stream.finish().text, stream.stopped, taken))
    assert results[0] == results[1] == results[2]
    whole = tokenizer.decode(ids)
    found = [stop for stop in stops if stop in whole]
    assert (results[0][1] is None) == (not found)
    if not found:
        assert results[0][0] == whole
