"""An INT8 KV cache as the engine keeps it: grown, shrunk, checked, refused without its kernels."""

from __future__ import annotations

import pytest
import torch

from engine_actor.load.tiny import tiny_config
from engine_actor.model.config import ModelConfig
from engine_actor.model.kv_store import KVStore, kv_bytes_per_block
from engine_actor.model.precision import resolve_kv_dtype

CPU = torch.device("cpu")


def config_of() -> ModelConfig:
    """Two layers, two KV heads of 16."""
    return ModelConfig.from_hf(tiny_config(), None)


def store_of(config: ModelConfig, n_blocks: int) -> KVStore:
    """Random codes and scales."""
    store = KVStore(config, torch.int8, 4, CPU)
    store.resize(n_blocks)
    for layer in store.layers:
        layer.codes.random_(-127, 128)
        layer.scales.uniform_(0.01, 0.1)
    return store


def test_resizing_keeps_what_stays_and_adds_zeros() -> None:
    store = store_of(config_of(), 5)
    before, sums = store.layers[1], store.checksum((0, 1, 2))
    store.resize(9)
    assert store.n_blocks == 9
    assert torch.equal(store.layers[1].codes[:5], before.codes)
    assert torch.equal(store.layers[1].scales[:5], before.scales)
    assert not store.layers[1].codes[5:].any()
    store.resize(3)
    assert store.checksum((0, 1, 2)) == sums


def test_a_checksum_sees_codes_and_scales() -> None:
    store = store_of(config_of(), 2)
    sums = store.checksum((1,))
    store.layers[0].scales[1, 3, 1, 0] += 0.5
    changed = store.checksum((1,))
    store.layers[0].codes[1, 0, 0, 0, 0] ^= 1
    assert len({sums, changed, store.checksum((1,))}) == 3


def test_bytes_of_a_block_are_those_of_its_tensors() -> None:
    config = config_of()
    store = store_of(config, 6)
    total = sum(layer.nbytes for layer in store.layers)
    assert kv_bytes_per_block(config, torch.int8, 4) * 6 == total


def test_a_cpu_has_no_kernel_for_it() -> None:
    with pytest.raises(ValueError, match="int8 is read by the CUDA kernels only"):
        resolve_kv_dtype(config_of(), CPU, "fast", "int8")
    with pytest.raises(ValueError, match="exact needs kv"):
        resolve_kv_dtype(config_of(), CPU, "exact", "int8")
