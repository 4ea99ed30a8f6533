"""The incremental detokeniser against the whole decode, on real tokenizers of three kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.core.detok import REPLACEMENT, IncrementalDetokenizer
from tests.doubles.tiny_tokenizers import ALL, BOS, CORPUS, EOS, IM_END, byte_level, llama_like

_words = st.sampled_from([word for line in CORPUS for word in line.split(" ")])
_texts = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40),
    st.lists(st.one_of(_words, st.just("  "), st.just("\n")), max_size=12).map(" ".join),
    st.text(alphabet="🙂👍🏽👨‍👩‍👧🇫🇷你好สวัस्क é ", max_size=25),
)


def _split(ids: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(ids[start : start + size])
        start += size
    return [*pieces, ids[start:]]


def _decode(kind: str, skip_special: bool = True) -> Callable[[Sequence[int]], str]:
    tokenizer = ALL[kind]()
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=skip_special)


@pytest.mark.parametrize("kind", sorted(ALL))
@settings(max_examples=150)
@given(text=_texts, sizes=st.lists(st.integers(0, 5), max_size=30))
def test_any_split_equals_the_whole_decode(kind: str, text: str, sizes: list[int]) -> None:
    """B-04: leading spaces, merges and characters over several tokens survive, for any split."""
    decode = _decode(kind)
    ids = ALL[kind]().encode(text, add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(decode)
    pieces = [detokenizer.add(piece) for piece in _split(ids, sizes)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == decode(ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces), "B-02: half a character was sent"


@pytest.mark.parametrize("kind", sorted(ALL))
@settings(max_examples=150)
@given(prompt=_texts, text=_texts)
def test_continues_a_prompt(kind: str, prompt: str, text: str) -> None:
    """B-04: behind a prompt, prompt text plus streamed text is the text of all ids."""
    decode = _decode(kind)
    encode = ALL[kind]().encode
    prompt_ids = [BOS, *encode(prompt, add_special_tokens=False).ids]
    ids = encode(text, add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(decode, prompt_ids)
    streamed = "".join([detokenizer.add([token]) for token in ids]) + detokenizer.flush()
    assert decode(prompt_ids) + streamed == decode(prompt_ids + ids)


@pytest.mark.parametrize("kind", sorted(ALL))
def test_long_text_with_special_tokens_in_it(kind: str) -> None:
    """B-04: the context is cut many times, inside runs of byte tokens and behind specials."""
    ids: list[int] = []
    for round_ in range(6):
        for line in CORPUS:
            ids += ALL[kind]().encode(line * 2, add_special_tokens=False).ids
            ids += [IM_END] * (round_ * 6)
    for skip in (True, False):
        decode = _decode(kind, skip)
        detokenizer = IncrementalDetokenizer(decode)
        assert "".join([detokenizer.add([token]) for token in ids]) == decode(ids)


def test_space_after_a_skipped_special_token() -> None:
    """B-04: the token behind a dropped special one is not the text's first."""
    decode = _decode("llama_like")
    ids = llama_like().encode("the", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(decode, [*ids, *[EOS] * 30])
    assert detokenizer.add(ids) == " the"


@pytest.mark.parametrize("kind", ["byte_level", "llama_like"])
def test_emoji_is_held_until_it_is_whole(kind: str) -> None:
    """B-02: each character over 2 to 4 tokens; nothing is sent before it is complete."""
    decode = _decode(kind)
    ids = _byte_ids(kind, "🙂".encode())
    detokenizer = IncrementalDetokenizer(decode, [*ids, *ids])
    assert [detokenizer.add([token]) for token in ids] == ["", "", "", "🙂"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", ["byte_level", "llama_like"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_end_inside_an_emoji_gives_one_replacement(kind: str, cut: int) -> None:
    """B-02: max_tokens ends inside the character: one U+FFFD at the end, once."""
    decode = _decode(kind)
    ids = _byte_ids(kind, "好🙂".encode())
    detokenizer = IncrementalDetokenizer(decode)
    assert detokenizer.add(ids[: len(ids) - cut]) == "好"
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_text_in_front_of_a_broken_character_is_sent_at_once() -> None:
    """A token that ends in half a character gives its whole characters right away."""
    pieces = {0: b"abc\xf0\x9f", 1: b"\x99\x82", 2: b"!"}
    detokenizer = IncrementalDetokenizer(
        lambda ids: b"".join(pieces[token] for token in ids).decode("utf-8", "replace")
    )
    assert [detokenizer.add([token]) for token in (0, 1, 2)] == ["abc", "🙂", "!"]


def test_broken_byte_run_keeps_what_was_sent() -> None:
    """A byte-fallback decoder blanks the whole run; characters already sent are not sent again."""
    decode = _decode("llama_like")
    good = llama_like().encode("दु", add_special_tokens=False).ids[1:]
    letter = llama_like().encode("a", add_special_tokens=False).ids[-1]
    detokenizer = IncrementalDetokenizer(decode)
    assert detokenizer.add(good) == "दु"
    assert detokenizer.add(good[:1]) == ""
    assert detokenizer.add([letter]) == REPLACEMENT + "a"


@settings(max_examples=150)
@given(data=st.binary(max_size=60))
def test_any_bytes_of_a_byte_level_tokenizer(data: bytes) -> None:
    """Invalid UTF-8 of any kind: same text as the whole decode."""
    ids = _byte_ids("byte_level", data)
    decode = _decode("byte_level")
    assert decode(ids) == data.decode("utf-8", "replace")
    detokenizer = IncrementalDetokenizer(decode)
    streamed = "".join([detokenizer.add([token]) for token in ids]) + detokenizer.flush()
    assert streamed.rstrip(REPLACEMENT) == decode(ids).rstrip(REPLACEMENT)


@pytest.mark.parametrize("kind", ["byte_level", "llama_like"])
@pytest.mark.parametrize("data", [b"\x80", b"\xe1\x80", b"\xf0\x9f\x99"])
def test_endless_invalid_bytes_are_not_hoarded(kind: str, data: bytes) -> None:
    """A model that emits only continuation bytes: text flows, and what is held stays bounded."""
    tokens = _byte_ids(kind, data * 300)
    detokenizer = IncrementalDetokenizer(_decode(kind))
    sent = 0
    for token in tokens:
        sent += len(detokenizer.add([token]))
        assert detokenizer.pending <= 9
    assert sent >= 296
    letter = ALL[kind]().encode("a", add_special_tokens=False).ids[-1]
    assert detokenizer.add([letter]).endswith("a")


def _byte_ids(kind: str, data: bytes) -> list[int]:
    """One token for each byte."""
    if kind == "byte_level":
        return [_byte_tokens()[byte] for byte in data]
    return [llama_like().token_to_id(f"<0x{byte:02X}>") for byte in data]


@cache
def _byte_tokens() -> list[int]:
    """Token id of each single byte in the byte-level tokenizer."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    ids = [byte_level().token_to_id(letters[byte]) for byte in range(256)]
    assert None not in ids
    return ids
