"""The order of service: first come first served, priorities, ageing."""

from __future__ import annotations

import random

import pytest

from engine_actor.core.params import SamplingParams
from engine_actor.core.queue import RankedSequences, aged_level, rank_of
from engine_actor.core.sequence import Sequence


def request(order: int, arrived: float = 0.0, priority: int = 0, ageing_s: float = 5.0) -> Sequence:
    seq = Sequence(("c", order), [1], SamplingParams(), 1, arrived, priority)
    seq.rank = rank_of(arrived, priority, ageing_s, order)
    return seq


def test_equal_priority_is_first_come_first_served_even_at_the_same_instant() -> None:
    ranked = RankedSequences()
    late, first, second = request(3, 1.0), request(1), request(2)
    for seq in (late, second, first):
        ranked.add(seq)
    assert list(ranked) == [first, second, late]
    assert ranked.last is late


def test_smaller_priority_goes_first_until_the_other_has_aged_past_it() -> None:
    """B-33: one low request among a steady run of high ones is first after its ageing time."""
    low = request(1, arrived=0.0, priority=2)
    soon = request(2, arrived=9.9, priority=0)
    later = request(3, arrived=10.1, priority=0)
    ranked = RankedSequences()
    for seq in (low, soon, later):
        ranked.add(seq)
    assert list(ranked) == [soon, low, later]


def test_aged_level_drops_by_one_for_each_whole_ageing_time() -> None:
    seq = request(1, arrived=100.0, priority=3)
    assert [aged_level(seq, now, 5.0) for now in (100.0, 104.9, 105.0, 115.0)] == [3, 3, 2, 0]


def test_a_sequence_is_found_by_identity_and_added_once() -> None:
    ranked = RankedSequences()
    seq, twin = request(1), request(1)
    ranked.add(seq)
    assert seq in ranked
    assert twin not in ranked
    with pytest.raises(ValueError, match="here already"):
        ranked.add(seq)
    with pytest.raises(KeyError):
        ranked.remove(twin)
    ranked.remove(seq)
    assert len(ranked) == 0


def test_any_mix_of_adds_and_removes_keeps_the_order() -> None:
    draw = random.Random(7)
    ranked = RankedSequences()
    here: list[Sequence] = []
    for order in range(300):
        seq = request(order, draw.uniform(0, 50), draw.randrange(-2, 3))
        ranked.add(seq)
        here.append(seq)
        if draw.random() < 0.4:
            ranked.remove(here.pop(draw.randrange(len(here))))
        assert list(ranked) == sorted(here, key=lambda each: each.rank)
