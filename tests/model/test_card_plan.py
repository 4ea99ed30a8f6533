"""Plans on plain numbers: never more than there is, monotone, refused with what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.model.card_fit import LEAST_CONTEXT, plan_card
from engine_actor.model.card_plan import (
    LATER_BYTES,
    Card,
    CardPlan,
    Part,
    Request,
    Settings,
    allowance,
)
from engine_actor.model.ledger import MIB

BLOCK = 16
NAMES = {
    "model.max_model_len": "max_model_len",
    "engine.prefill_chunk_tokens": "chunk_tokens",
    "engine.max_num_seqs": "max_num_seqs",
}


def request_of(
    total: int,
    weights: int,
    asked: Settings,
    *,
    limit: int | None = None,
    reserve: int = 0,
    outside: int = 0,
    loading: int = 0,
    budget: int | None = None,
    is_length_asked: bool = True,
) -> Request:
    """A row of a chunk and of a batch cost a KiB each, a token of KV 100 bytes, 52 in INT8."""

    def parts(of: Settings) -> Sequence[Part]:
        return (
            Part("weights", weights),
            Part("steps", 1024 * (of.chunk_tokens + of.max_num_seqs)),
            Part("tables", of.max_model_len),
        )

    def pool(blocks: int, of: Settings) -> int:
        return -(-blocks * BLOCK * (52 if of.int8_kv else 100) // 512) * 512

    return Request(
        Card(total, outside),
        limit,
        reserve,
        asked,
        parts,
        loading,
        pool,
        BLOCK,
        budget,
        is_length_asked,
    )


CARDS = st.builds(
    request_of,
    st.integers(0, 400 * MIB),
    st.integers(0, 300 * MIB),
    st.builds(
        Settings,
        st.integers(1, 100_000),
        st.integers(1, 300),
        st.integers(1, 5000),
        st.booleans(),
    ),
    limit=st.none() | st.integers(0, 400 * MIB),
    reserve=st.integers(0, 50 * MIB),
    outside=st.integers(0, 100 * MIB),
    loading=st.integers(0, 50 * MIB),
    budget=st.none() | st.integers(0, 100 * MIB),
    is_length_asked=st.booleans(),
)


@given(CARDS)
@settings(max_examples=200, deadline=None)
def test_never_more_than_there_is(request: Request) -> None:
    plan = plan_card(request)
    if plan.refusal is not None:
        assert plan.kv_blocks == 0
        return
    assert plan.planned <= plan.allowance
    assert plan.allowance + request.reserve <= max(request.card.total, request.reserve)
    if request.limit is not None:
        assert plan.allowance + request.reserve <= max(request.limit, request.reserve)
    assert plan.kv_blocks >= 1
    assert plan.kv_bytes >= plan.kv_blocks * BLOCK * 52


@given(CARDS)
@settings(max_examples=200, deadline=None)
def test_one_block_more_would_not_fit_or_not_be_used(request: Request) -> None:
    plan = plan_card(request)
    if plan.refusal is not None:
        return
    more = request.pool_bytes(plan.kv_blocks + 1, plan.settings)
    left = plan.allowance - (plan.planned - plan.kv_bytes)
    useful = plan.settings.max_num_seqs * -(-plan.settings.max_model_len // BLOCK)
    over_budget = request.budget is not None and more > request.budget
    assert more > left or over_budget or plan.kv_blocks == useful


@given(CARDS, st.integers(0, 100 * MIB))
@settings(max_examples=200, deadline=None)
def test_a_larger_card_never_holds_less(request: Request, extra: int) -> None:
    larger = replace(request, card=replace(request.card, total=request.card.total + extra))
    small, large = plan_card(request), plan_card(larger)
    assert large.refusal is None or small.refusal is not None
    if small.refusal is None:
        assert large.settings.max_model_len >= small.settings.max_model_len
        for tokens in (1, 16, 1000):
            if large.settings.max_model_len == small.settings.max_model_len:
                assert large.sequences(tokens) >= small.sequences(tokens)


@given(CARDS)
@settings(max_examples=100, deadline=None)
def test_what_would_fit_fits_and_nothing_larger_does(request: Request) -> None:
    plan = plan_card(request)
    for line in plan.instead:
        name, _, value = line.partition(": ")
        if "with" in line:
            assert plan_card(with_all(request, line)).refusal is None
            continue
        if name == "engine.kv.dtype":
            assert plan_card(with_setting(request, "int8_kv", True)).refusal is None
            continue
        field, number = NAMES[name], int(value)
        assert number < getattr(request.settings, field)
        assert plan_card(with_setting(request, field, number)).refusal is None
        if field != "max_model_len" or request.is_length_asked:
            next_one = plan_card(with_setting(request, field, number + 1))
            assert next_one.refusal is not None


def with_setting(request: Request, field: str, value: int) -> Request:
    asked = replace(request.settings, **{field: value})  # type: ignore[arg-type]
    if field == "max_model_len":
        return replace(request, settings=asked, is_length_asked=True)
    return replace(request, settings=asked)


def with_all(request: Request, line: str) -> Request:
    for part in line.replace(" with ", ", ").split(", "):
        name, _, value = part.partition(": ")
        field = {**NAMES, "engine.kv.dtype": "int8_kv"}[name]
        request = with_setting(request, field, value == "int8" or int(value))
    return request


PLAIN = Settings(max_model_len=4096, max_num_seqs=8, chunk_tokens=256, int8_kv=False)


def planned(total: int, weights: int, asked: Settings = PLAIN, **more: object) -> CardPlan:
    return plan_card(request_of(total, weights, asked, **more))  # type: ignore[arg-type]


def test_the_reserve_holds_the_context_and_more_where_others_have_more() -> None:
    card = Card(4096 * MIB, outside=190 * MIB)
    assert allowance(card, None, 384 * MIB) == (4096 - 384) * MIB
    crowded = Card(4096 * MIB, outside=700 * MIB)
    assert allowance(crowded, None, 384 * MIB) == 4096 * MIB - 700 * MIB - LATER_BYTES
    large = Card(143_000 * MIB, outside=600 * MIB)
    assert allowance(large, 4096 * MIB, 384 * MIB) == (4096 - 384) * MIB
    assert allowance(Card(100 * MIB), None, 384 * MIB) == 0


def test_a_context_that_nobody_asked_for_is_cut_to_what_fits() -> None:
    total = LATER_BYTES + 7 * MIB
    cut = planned(total, 2 * MIB, replace(PLAIN, max_model_len=131_072), is_length_asked=False)
    assert cut.refusal is None
    assert LEAST_CONTEXT < cut.settings.max_model_len < 131_072
    assert cut.kv_tokens >= cut.settings.max_model_len
    asked = planned(total, 2 * MIB, replace(PLAIN, max_model_len=131_072))
    assert asked.refusal is not None
    assert f"model.max_model_len: {cut.settings.max_model_len}" in asked.instead


def test_a_model_that_is_too_large_to_load_is_refused() -> None:
    plan = planned(LATER_BYTES + 136 * MIB, 120 * MIB, loading=40 * MIB)
    assert plan.refusal == "loading takes 160 MiB, there are 136 MiB for it"
    assert plan.instead == ()


@pytest.mark.parametrize("more", [{}, {"limit": 100 * MIB}])
def test_a_card_that_the_reserve_fills_is_refused_by_that(more: dict[str, int]) -> None:
    plan = planned(200 * MIB if not more else 10_000 * MIB, MIB, reserve=384 * MIB, **more)
    of = "100 MiB" if more else "200 MiB"
    assert plan.refusal == f"what is left alone takes all of {of}"
    assert plan.instead == ()


def test_int8_is_named_where_it_helps() -> None:
    asked = replace(PLAIN, max_model_len=20_000, max_num_seqs=1, chunk_tokens=1)
    plan = planned(LATER_BYTES + 2 * MIB, MIB // 2, asked)
    assert plan.refusal is not None
    assert plan.refusal.startswith("a sequence of 20000 tokens needs 2 MiB of KV cache, 1 MiB are")
    assert "engine.kv.dtype: int8" in plan.instead


@pytest.mark.parametrize(("tokens", "sequences"), [(1, 8), (16, 8), (2048, 5), (4096, 2)])
def test_how_many_sequences_and_how_long(tokens: int, sequences: int) -> None:
    plan = replace(planned(300 * MIB, MIB), kv_blocks=700)
    assert plan.sequences(tokens) == sequences
    assert plan.longest(sequences) >= tokens
