"""Paged attention against the row-by-row reference: ragged, shuffled, windowed (S-18)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.exact import attention_exact
from kernels.attention.op import attention_reference, plan_attention
from kernels.attention.sdpa import attention_sdpa
from kernels.kv.op import plan_write, write_kv, write_kv_reference

BLOCK, BLOCKS, KV_HEADS, DIM = 4, 24, 2, 8


def cache(seed: int = 0, heads: int = KV_HEADS) -> torch.Tensor:
    """A full random cache."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(BLOCKS, BLOCK, 2, heads, DIM, generator=draw)


def queries(rows: int, heads: int = 6, seed: int = 1) -> torch.Tensor:
    """[rows, heads, DIM]"""
    return torch.randn(rows, heads, DIM, generator=torch.Generator().manual_seed(seed))


def plan_of(
    q_lens: list[int], kv_lens: list[int], blocks: list[list[int]], window: int | None = None
) -> object:
    """A plan on the CPU."""
    return plan_attention(q_lens, kv_lens, blocks, BLOCK, torch.device("cpu"), window)


CASES = {
    "one decode, consecutive blocks": ([1], [11], [[3, 4, 5]]),
    "one decode, scattered blocks": ([1], [11], [[9, 2, 5]]),
    "whole prompt": ([10], [10], [[6, 7, 8]]),
    "chunk after cached blocks": ([5], [13], [[1, 0, 20, 3]]),
    "mixed": ([1, 6, 1, 3], [9, 6, 1, 16], [[4, 9, 1], [2, 3], [7], [20, 11, 12, 13]]),
    "decodes of like and unlike lengths": (
        [1, 1, 1, 1],
        [4, 7, 40, 39],
        [[3], [8, 2], [0, 1, 4, 5, 6, 7, 9, 10, 11, 12], list(range(13, 23))],
    ),
    "more blocks reserved than used": ([2], [5], [[8, 2, 22, 23]]),
}


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("attention", [attention_sdpa, attention_exact])
def test_equals_reference(
    attention: Callable[..., torch.Tensor], case: str, window: int | None
) -> None:
    """fp32, grouped heads."""
    q_lens, kv_lens, blocks = CASES[case]
    plan, kv, q = plan_of(q_lens, kv_lens, blocks, window), cache(), queries(sum(q_lens))
    want = attention_reference(q, kv, plan).flatten(1)
    got = attention(q, kv, plan)
    assert got.shape == want.shape
    assert (got - want).abs().max() < 2e-6


@pytest.mark.parametrize("heads", [2, 4, 10])
def test_any_group_size(heads: int) -> None:
    """One to five query heads a KV head."""
    plan, q = plan_of([3, 1], [9, 6], [[1, 2, 3], [7, 5]]), queries(4, heads)
    want = attention_reference(q, cache(), plan).flatten(1)
    assert (attention_sdpa(q, cache(), plan) - want).abs().max() < 2e-6


def test_bf16_cache() -> None:
    """Half the bytes, eight bits of mantissa."""
    plan = plan_of([1, 4], [13, 9], [[0, 1, 2, 3], [9, 5, 7]])
    kv, q = cache().bfloat16(), queries(5).bfloat16()
    want = attention_reference(q, kv, plan).flatten(1)
    assert (attention_sdpa(q, kv, plan).float() - want).abs().max() < 3e-2


@given(
    lens=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4),
    seed=st.integers(0, 20),
    window=st.sampled_from([None, 3, 8]),
)
def test_exact_rows_do_not_depend_on_chunks_blocks_or_neighbours(
    lens: list[tuple[int, int]], seed: int, window: int | None
) -> None:
    """A row of a mixed batch in scattered blocks has the bits of that row alone."""
    q_lens, kv_lens = [q for q, _ in lens], [q + before for q, before in lens]
    draw = torch.Generator().manual_seed(seed)
    free = torch.randperm(BLOCKS, generator=draw).tolist()
    blocks = [[free.pop() for _ in range(-(-n // BLOCK))] for n in kv_lens]
    kv, q = cache(seed), queries(sum(q_lens), seed=seed)
    batch = attention_exact(q, kv, plan_of(q_lens, kv_lens, blocks, window))
    row = 0
    for q_len, kv_len, mine in zip(q_lens, kv_lens, blocks, strict=True):
        fresh = torch.zeros_like(kv)
        fresh[: len(mine)] = kv[mine]
        for i in range(q_len):
            n = kv_len - q_len + 1 + i
            plan = plan_of([1], [n], [list(range(len(mine)))], window)
            alone = attention_exact(q[row : row + 1], fresh, plan)
            assert torch.equal(alone[0], batch[row])
            row += 1


@pytest.mark.parametrize("slots", [[5, 6, 7, 8], [5, 6, 8, 7], [95], [0, 40, 3]])
def test_write_kv_equals_reference(slots: list[int]) -> None:
    """One slice for consecutive slots, scattered rows otherwise; nothing else is touched."""
    new = queries(len(slots), 2 * KV_HEADS)
    got, want = cache(), cache()
    write_kv(got, new, plan_write(torch.tensor(slots), slots))
    write_kv_reference(want, new, slots)
    assert torch.equal(got, want)


def test_write_kv_converts() -> None:
    """fp32 rows into a bf16 cache, either way of writing."""
    new = queries(3, 2 * KV_HEADS)
    for slots in ([1, 2, 3], [1, 9, 4]):
        got, want = cache().bfloat16(), cache().bfloat16()
        write_kv(got, new, plan_write(torch.tensor(slots), slots))
        write_kv_reference(want, new, slots)
        assert torch.equal(got, want)
