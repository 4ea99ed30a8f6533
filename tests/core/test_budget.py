"""Budgets: bytes to blocks, tokens of a step, their even split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.core.budget import (
    blocks_for_bytes,
    limited_blocks,
    prefill_budget,
    share_tokens,
    tokens_beside,
)


def test_blocks_for_bytes_rounds_down_and_refuses_none() -> None:
    assert blocks_for_bytes(1000, 100) == 10
    assert blocks_for_bytes(1099, 100) == 10
    with pytest.raises(ValueError, match="99 bytes hold no KV block of 100 bytes"):
        blocks_for_bytes(99, 100)
    with pytest.raises(ValueError, match="block_bytes"):
        blocks_for_bytes(99, 0)


def test_a_limit_leaves_at_least_one_block() -> None:
    assert limited_blocks(64, 0.5) == 32
    assert limited_blocks(3, 0.5) == 1
    assert limited_blocks(1, 0.01) == 1


def test_the_chunk_is_smaller_only_while_a_stream_decodes() -> None:
    assert prefill_budget(256, 64, n_decoding=0) == 256
    assert prefill_budget(256, 64, n_decoding=1) == 64
    assert prefill_budget(256, None, n_decoding=9) == 256
    assert prefill_budget(32, 64, n_decoding=1) == 32


@pytest.mark.parametrize(
    ("budget", "n_decoding", "tokens"),
    [
        (512, 8, 504),
        (512, 1, 511),
        (600, 8, 568),
        (64, 8, 56),
        (64, 64, 64),
        (64, 100, 28),
        (16, 8, 16),
    ],
)
def test_prompt_and_decoded_rows_fill_whole_tiles_together(
    budget: int, n_decoding: int, tokens: int
) -> None:
    """S-111: 504 and 8 rows cost what 512 do, 512 and 8 what 576 do."""
    assert tokens_beside(budget, n_decoding) == tokens


@given(st.integers(1, 5000), st.integers(0, 300))
def test_a_mixed_forward_always_takes_some_of_the_prompt(budget: int, n_decoding: int) -> None:
    assert tokens_beside(budget, n_decoding) >= 1


@pytest.mark.parametrize(
    ("wants", "budget", "shares"),
    [
        ([100, 100], 64, [32, 32]),
        ([10, 100], 64, [10, 54]),
        ([100, 10, 100], 64, [27, 10, 27]),
        ([5, 5, 5], 2, [1, 1, 0]),
        ([100], 64, [64]),
        ([3, 4], 64, [3, 4]),
        ([], 64, []),
        ([7, 7], 0, [0, 0]),
    ],
)
def test_share_tokens(wants: list[int], budget: int, shares: list[int]) -> None:
    assert share_tokens(wants, budget) == shares


@given(wants=st.lists(st.integers(0, 300), max_size=8), budget=st.integers(0, 500))
def test_shares_use_the_whole_budget_and_never_more(wants: list[int], budget: int) -> None:
    shares = share_tokens(wants, budget)
    assert sum(shares) == min(budget, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    unmet = [share for share, want in zip(shares, wants, strict=True) if share < want]
    # Even: nobody got two tokens more than one who still wants.
    assert all(share <= least + 1 for share in shares for least in unmet)
