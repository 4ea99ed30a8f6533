"""The KV cache at fixed addresses, on a card that is a CPU tensor: every dtype, growth, shrink."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine_actor import ops
from engine_actor.load.tiny import tiny_config
from engine_actor.model.config import ModelConfig
from engine_actor.model.kv_store import KVStore, kv_bytes_per_block
from tests.doubles.mapped_memory import GRANULARITY, FakeMemory

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
CAPACITY = 40


def config_of() -> ModelConfig:
    return ModelConfig.from_hf(tiny_config(), None)


def store_on(memory: FakeMemory, dtype: torch.dtype) -> KVStore:
    def make(block_bytes: Sequence[int], capacity: int) -> ops.VirtualPool:
        return ops.VirtualPool(block_bytes, capacity, memory)

    return KVStore(config_of(), dtype, 4, CPU, make)


def tensors(store: KVStore) -> list[torch.Tensor]:
    return [
        tensor
        for layer in store.layers
        for tensor in ((layer.codes, layer.scales) if isinstance(layer, ops.Int8KV) else (layer,))
    ]


def fill(store: KVStore) -> None:
    for number, tensor in enumerate(tensors(store)):
        tensor.fill_(number + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_grows_and_shrinks_in_place(dtype: torch.dtype) -> None:
    memory = FakeMemory()
    store = store_on(memory, dtype)
    store.reserve(CAPACITY)
    store.resize(5)
    places = [tensor.data_ptr() for tensor in tensors(store)]
    shapes = [tensor.shape[1:] for tensor in tensors(store)]
    assert not any(bool(tensor.any()) for tensor in tensors(store))
    fill(store)
    sums = store.checksum((0, 3))
    for n_blocks in (9, CAPACITY, 4, 30):
        store.resize(n_blocks)
        assert store.n_blocks == n_blocks
        assert [tensor.data_ptr() for tensor in tensors(store)] == places
        assert store.checksum((0, 3)) == sums
    for tensor in tensors(store):
        assert not bool(tensor[4:].any()), "what came back is not clear"
    plain = KVStore(config_of(), dtype, 4, CPU)
    assert [tensor.shape[1:] for tensor in tensors(plain)] == shapes
    assert [tensor.dtype for tensor in tensors(plain)] == [t.dtype for t in tensors(store)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_full_cache_takes_its_blocks_bytes_and_no_granule_a_layer(dtype: torch.dtype) -> None:
    memory = FakeMemory()
    store = store_on(memory, dtype)
    store.reserve(CAPACITY)
    store.resize(CAPACITY)
    exact = CAPACITY * kv_bytes_per_block(config_of(), dtype, 4)
    assert exact <= store.nbytes == memory.mapped_bytes < exact + 2 * GRANULARITY


def test_no_memory_changes_nothing() -> None:
    memory = FakeMemory()
    store = store_on(memory, torch.float16)
    store.reserve(CAPACITY)
    store.resize(5)
    fill(store)
    sums, held = store.checksum(tuple(range(5))), memory.mapped_bytes
    memory.room = held
    with pytest.raises(torch.OutOfMemoryError):
        store.resize(CAPACITY)
    assert (store.n_blocks, memory.mapped_bytes) == (5, held)
    assert store.checksum(tuple(range(5))) == sums
    memory.room *= 100
    store.resize(CAPACITY)
    assert store.checksum(tuple(range(5))) == sums


def test_another_capacity_is_another_pool() -> None:
    memory = FakeMemory()
    store = store_on(memory, torch.float16)
    store.reserve(CAPACITY)
    store.resize(5)
    store.reserve(CAPACITY)
    assert store.n_blocks == 5
    store.reserve(2 * CAPACITY)
    assert (store.n_blocks, memory.mapped_bytes, len(memory.spaces)) == (0, 0, 1)


def test_past_what_was_reserved_it_moves_and_keeps_its_content() -> None:
    memory = FakeMemory()
    store = store_on(memory, torch.int8)
    store.resize(3)
    fill(store)
    sums = store.checksum((0, 1, 2))
    store.resize(11)
    assert store.checksum((0, 1, 2)) == sums
    assert len(memory.spaces) == 1
    assert not any(bool(tensor[3:].any()) for tensor in tensors(store))


def test_it_says_why_it_may_move() -> None:
    assert store_on(FakeMemory(), torch.float16).why_not_fixed is None
    other = KVStore(config_of(), torch.float16, 4, CPU, "the driver does not map memory")
    assert other.why_not_fixed == "the driver does not map memory"
    other.reserve(9)
    other.resize(3)
    assert other.nbytes == 3 * kv_bytes_per_block(config_of(), torch.float16, 4)
