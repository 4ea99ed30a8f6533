"""Stop strings over any split of the text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.core.stop import StopMatcher

_alphabet = st.text(alphabet="abAé", max_size=30)
_stops = st.lists(st.text(alphabet="abAé", min_size=1, max_size=5), max_size=4)


def _run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(tuple(stops), include)
    sent, stopped = "", None
    for piece in pieces:
        text, met = matcher.add(piece)
        sent += text
        stopped = stopped or met
    return sent + matcher.flush(), stopped


def _expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, said plainly: grow the text by one character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_stop_string_over_tokens() -> None:
    """B-01, first run: "END!" over three tokens; nothing of it is sent."""
    assert _run(["x", " EN", "D", "!", "y"], ["END!"]) == ("x ", "END!")


def test_held_text_is_released_at_the_end() -> None:
    """B-01, second run: the stop string is never complete; nothing is lost."""
    assert _run(["x", " EN", "D", "?"], ["END!"]) == ("x END?", None)
    assert _run(["x", " EN", "D"], ["END!"]) == ("x END", None)


def test_held_text_is_released_as_soon_as_it_cannot_complete() -> None:
    """B-01: no over-holding."""
    matcher = StopMatcher(("END!",))
    assert matcher.add("x EN") == ("x ", None)
    assert matcher.held == 2
    assert matcher.add("EN") == ("EN", None)
    assert matcher.add("T") == ("ENT", None)
    assert matcher.held == 0


@settings(max_examples=500)
@given(text=_alphabet, stops=_stops, include=st.booleans(), cuts=st.lists(st.integers(0, 30)))
def test_any_split_equals_the_rule(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    """B-01: joined stream == whole text == the rule, for every split."""
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert _run(pieces, stops, include) == _expected(text, stops, include)
    assert _run([text], stops, include) == _expected(text, stops, include)
    assert _run(list(text), stops, include) == _expected(text, stops, include)


def test_first_complete_match_wins_and_ties_go_to_the_longer() -> None:
    """The match does not depend on what comes after it, nor on the order of the list."""
    assert _run(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert _run(["xab"], ["b", "ab"]) == ("x", "ab")
    assert _run(["xab"], ["ab", "b"]) == ("x", "ab")


def test_included_stop_string_holds_nothing_back() -> None:
    """include_stop_str_in_output: text flows at once and ends with the stop string."""
    matcher = StopMatcher(("END!",), include=True)
    assert matcher.add("x EN") == ("x EN", None)
    assert matcher.held == 0
    assert matcher.add("D!y") == ("D!", "END!")
    assert matcher.flush() == ""


def test_nothing_after_a_match() -> None:
    """Text that arrives behind a match is dropped."""
    matcher = StopMatcher(("!",))
    assert matcher.add("a!b") == ("a", "!")
    assert matcher.add("c!") == ("", None)
    assert matcher.flush() == ""


def test_empty_stop_string_is_refused() -> None:
    """An empty stop string would match everywhere."""
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(("",))
