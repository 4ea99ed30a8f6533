"""torch and the KV pool's mappings under one cap, on a card of plain numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.model.ledger import CardLedger


class Card:
    """`kept`: reserved by torch and in no use. `others`: taken by whoever else."""

    def __init__(self, total: int, used: int = 0, kept: int = 0, others: int = 0) -> None:
        self.total = total
        self.used, self.kept, self.others = used, kept, others
        self.limit = total
        self.ledger = CardLedger(self)

    def card_free(self) -> int:
        return self.total - self.others - self.reserved() - self.ledger.mapped

    def reserved(self) -> int:
        return self.used + self.kept

    def empty_cache(self) -> None:
        self.kept = 0

    def set_limit(self, limit: int) -> None:
        self.limit = limit


def test_a_cap_holds_torch_and_what_is_mapped_together() -> None:
    card = Card(1000, used=100)
    card.ledger.hold(400)
    assert (card.limit, card.ledger.free()) == (400, 300)
    card.ledger.before_mapping(250)
    assert (card.limit, card.ledger.free(), card.ledger.held) == (150, 50, 350)
    with pytest.raises(torch.OutOfMemoryError, match="asks for 60 bytes, 50 are left of 400"):
        card.ledger.before_mapping(60)
    card.ledger.after_unmapping(250)
    assert (card.limit, card.ledger.free()) == (400, 300)
    card.ledger.hold(None)
    assert card.limit == 1000


def test_what_torch_keeps_for_later_is_given_back_first() -> None:
    card = Card(1000, used=100, kept=250)
    card.ledger.hold(400)
    card.ledger.before_mapping(300)
    assert (card.kept, card.ledger.mapped) == (0, 300)


def test_without_a_cap_the_card_is_the_limit() -> None:
    card = Card(1000, used=100, kept=100, others=300)
    assert (card.ledger.free(), card.ledger.outside) == (500, 300)
    card.ledger.before_mapping(550)
    assert (card.kept, card.ledger.free()) == (0, 50)
    assert (card.limit, card.ledger.outside) == (1000, 300)
    with pytest.raises(torch.OutOfMemoryError, match=r"51 bytes, 50 are left$"):
        card.ledger.before_mapping(51)


@given(
    st.integers(0, 1000),
    st.integers(0, 300),
    st.integers(0, 300),
    st.lists(st.integers(-400, 400), max_size=12),
)
def test_the_cap_is_never_passed(cap: int, used: int, kept: int, steps: list[int]) -> None:
    card = Card(2000, used, kept, others=100)
    card.ledger.hold(cap)
    for step in steps:
        if step < 0:
            card.ledger.after_unmapping(min(-step, card.ledger.mapped))
            continue
        before = card.ledger.mapped
        try:
            card.ledger.before_mapping(step)
        except torch.OutOfMemoryError:
            assert card.ledger.mapped == before
            assert before + step + used > cap
        else:
            assert card.ledger.held <= cap or step == 0
        # torch may reserve `limit` in all, so with the pool it never has more than the cap.
        assert card.limit + card.ledger.mapped <= max(cap, card.ledger.mapped)
