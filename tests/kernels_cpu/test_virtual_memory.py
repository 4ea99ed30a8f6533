"""Pools at fixed addresses, on a card that is a CPU tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.jit.virtual_memory import (
    ALIGNMENT,
    MOST_GRANULES,
    VirtualPool,
    array_starts,
    full_bytes,
    granule_for,
)
from tests.doubles.mapped_memory import GRANULARITY, FakeMemory

BLOCKS = st.lists(st.integers(1, 3000), min_size=1, max_size=5)


@given(BLOCKS, st.integers(1, 40), st.lists(st.floats(0, 1), min_size=1, max_size=6))
@settings(deadline=None)
def test_growth_and_shrink_keep_content_and_addresses(
    block_bytes: list[int], capacity: int, shares: list[float]
) -> None:
    memory = FakeMemory()
    pool = VirtualPool(block_bytes, capacity, memory)
    addresses = [pool.address(index) for index in range(len(block_bytes))]
    known = 0
    for share in shares:
        n_blocks = int(share * capacity)
        pool.resize(n_blocks)
        for index, each in enumerate(block_bytes):
            array = pool.tensor(index)
            assert array.numel() == n_blocks * each
            kept = min(known, n_blocks) * each
            assert bool((array[:kept] == index + 1).all())
            array.fill_(index + 1)
        assert [pool.address(index) for index in range(len(block_bytes))] == addresses
        assert pool.mapped_bytes == memory.mapped_bytes
        known = n_blocks
    assert all(address % ALIGNMENT == 0 for address in addresses)
    pool.close()
    assert memory.mapped_bytes == 0
    assert not memory.spaces


@given(BLOCKS, st.integers(1, 40))
@settings(deadline=None)
def test_a_full_pool_takes_its_bytes_rounded_up_once(block_bytes: list[int], capacity: int) -> None:
    memory = FakeMemory()
    pool = VirtualPool(block_bytes, capacity, memory)
    pool.resize(capacity)
    assert memory.mapped_bytes == full_bytes(block_bytes, capacity, GRANULARITY)
    ragged = sum(block_bytes) * capacity + len(block_bytes) * (ALIGNMENT - 1)
    assert memory.mapped_bytes <= ragged + GRANULARITY
    pool.close()


def test_out_of_memory_on_the_way_changes_nothing() -> None:
    memory = FakeMemory(room=8 * GRANULARITY)
    taken: list[int] = []
    pool = VirtualPool([GRANULARITY] * 3, 8, memory, taken.append, lambda size: taken.append(-size))
    pool.resize(2)
    pool.tensor(1).fill_(7)
    with pytest.raises(torch.OutOfMemoryError):
        pool.resize(4)
    held = 6 * GRANULARITY
    assert (pool.n_blocks, memory.mapped_bytes, sum(taken)) == (2, held, held)
    assert bool((pool.tensor(1) == 7).all())
    pool.close()
    assert sum(taken) == 0


def test_who_keeps_the_books_may_refuse_before_anything_is_taken() -> None:
    memory = FakeMemory()

    def refuse(size: int) -> None:
        raise torch.OutOfMemoryError(f"{size} are too many")

    pool = VirtualPool([GRANULARITY], 8, memory, refuse)
    with pytest.raises(torch.OutOfMemoryError, match="4096 are too many"):
        pool.resize(2)
    assert memory.mapped_bytes == 0


def test_memory_is_given_back_only_once_the_device_rests() -> None:
    memory = FakeMemory()
    pool = VirtualPool([GRANULARITY], 8, memory)
    pool.resize(6)
    assert memory.syncs == 0
    pool.resize(3)
    assert (memory.syncs, memory.mapped_bytes) == (1, 3 * GRANULARITY)
    pool.resize(3)
    assert memory.syncs == 1


def test_a_pool_that_nobody_holds_gives_everything_back() -> None:
    memory = FakeMemory()
    pool = VirtualPool([GRANULARITY], 8, memory)
    pool.resize(6)
    del pool
    assert memory.mapped_bytes == 0
    assert not memory.spaces


def test_past_its_capacity_there_is_nothing() -> None:
    pool = VirtualPool([16], 8, FakeMemory())
    with pytest.raises(ValueError, match="9 blocks in a pool of 8"):
        pool.resize(9)


def test_large_pools_take_large_granules() -> None:
    assert granule_for(MOST_GRANULES * GRANULARITY, GRANULARITY) == GRANULARITY
    assert granule_for(MOST_GRANULES * GRANULARITY + 1, GRANULARITY) == 2 * GRANULARITY
    assert array_starts([100, 300], 3) == ([0, 512], 1536)
