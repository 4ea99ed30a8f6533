"""The block pool: lowest id first, no double free, elastic at the tail."""

from __future__ import annotations

import pytest

from engine_actor.core.blocks import BlockPool


def test_the_lowest_free_id_goes_out_first() -> None:
    pool = BlockPool(5)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
    for block in (2, 0):
        assert pool.drop(block)
        pool.put_back(block)
    assert [pool.take() for _ in range(3)] == [0, 2, 4]
    assert pool.n_free == 0
    with pytest.raises(IndexError):
        pool.take()


@pytest.mark.parametrize("given_back", [(), (2, 0)])
def test_many_at_once_are_those_one_by_one(given_back: tuple[int, ...]) -> None:
    pools = BlockPool(9), BlockPool(9)
    for pool in pools:
        assert pool.take_many(4) == [0, 1, 2, 3]
        for block in given_back:
            pool.drop(block)
            pool.put_back(block)
    assert pools[0].take_many(4) == [pools[1].take() for _ in range(4)]
    for pool in pools:
        pool.check()
    assert pools[0].n_free == pools[1].n_free == 1 + len(given_back)
    with pytest.raises(IndexError):
        pools[0].take_many(4)


def test_a_shared_block_is_idle_only_after_its_last_reference() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.hold(block)
    assert not pool.drop(block)
    with pytest.raises(ValueError, match="held or free"):
        pool.put_back(block)
    assert pool.drop(block)
    pool.put_back(block)
    assert pool.n_free == 2


def test_double_free_double_drop_and_sharing_a_free_block_are_refused() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.drop(block)
    pool.put_back(block)
    with pytest.raises(ValueError, match="held or free"):
        pool.put_back(block)
    with pytest.raises(ValueError, match="no reference"):
        pool.drop(block)
    with pytest.raises(ValueError, match="is free"):
        pool.hold(block)


def test_held_blocks_above_a_smaller_capacity_leave_when_dropped() -> None:
    pool = BlockPool(6)
    held = [pool.take() for _ in range(5)]
    pool.resize(3)
    pool.check()
    assert (pool.n_free, pool.extent) == (0, 5)
    for block in held:
        pool.drop(block)
        pool.put_back(block)
    pool.check()
    assert (pool.n_free, pool.extent) == (3, 0)


def test_growth_gives_back_the_blocks_that_nobody_holds() -> None:
    pool = BlockPool(4)
    held = [pool.take() for _ in range(4)]
    pool.resize(2)
    pool.drop(held[2])
    pool.put_back(held[2])
    pool.resize(6)
    pool.check()
    assert [pool.take() for _ in range(3)] == [2, 4, 5]
    assert pool.references(3) == 1


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_pool_without_blocks_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(capacity)
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(1).resize(capacity)
