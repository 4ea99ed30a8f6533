"""Slots in the host's memory: their number, what they hold, and what is refused before any load."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.schema import AppArgs, EngineConfig, KVConfig
from engine_actor.build import engine_around
from engine_actor.core.block_copies import BlockCopy
from engine_actor.errors import CheckpointError
from engine_actor.model import host_blocks
from engine_actor.model.card_plan import Card
from engine_actor.model.host_blocks import HostBlocks, host_slots
from engine_actor.model.kv_store import KVStore, kv_bytes_per_block
from engine_actor.model.ledger import MIB
from engine_actor.planning import plan_for, render
from random_model import SHAPES, random_checkpoint

CPU = torch.device("cpu")
TINY = random_checkpoint(SHAPES["tiny"], CPU)


def config_of(**kv: Any) -> EngineConfig:
    return EngineConfig(kv=KVConfig(**kv))


def filled(dtype: torch.dtype, n_blocks: int) -> KVStore:
    """A cache of random bytes."""
    store = KVStore(TINY.config, dtype, 4, CPU)
    store.resize(n_blocks)
    draw = torch.Generator().manual_seed(3)
    for array in store.arrays():
        flat = array.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, generator=draw, dtype=torch.uint8))
    return store


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
def test_a_block_comes_back_byte_for_byte_into_another_place(dtype: torch.dtype) -> None:
    """The scales of an INT8 cache with its codes."""
    store = filled(dtype, 6)
    before = store.checksum((5, 2))
    blocks = HostBlocks(store, 3)
    assert blocks.nbytes == 3 * sum(store.block_bytes)
    assert sum(store.block_bytes) == kv_bytes_per_block(TINY.config, dtype, 4)
    blocks.copy([BlockCopy(5, 1, True), BlockCopy(2, 0, True)])
    for array in store.arrays():
        array.view(6, -1)[[2, 5]] = 0
    # The cache may move between the copies.
    store.resize(7)
    others = store.checksum((1, 3, 4))
    blocks.copy([BlockCopy(0, 1, False), BlockCopy(6, 0, False)])
    assert store.checksum((0, 6)) == before
    assert store.checksum((1, 3, 4)) == others


def test_the_budget_is_whole_blocks_and_none_without_a_prefix_cache() -> None:
    assert host_slots(config_of(), 1000) == 0
    assert host_slots(config_of(host_budget_mb=1), 1000) == MIB // 1000
    assert host_slots(config_of(host_budget_mb=1, prefix_cache=False), 1000) == 0
    with pytest.raises(CheckpointError, match=r"kv\.host_budget_mb: .* hold no KV block"):
        host_slots(config_of(host_budget_mb=1), 2 * MIB)


def test_more_than_is_free_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_blocks, "free_bytes", lambda device: 100 * MIB)
    args = AppArgs.model_validate({"engine": {"device": "cpu", "kv": {"host_budget_mb": 101}}})
    words = r"kv\.host_budget_mb: 101 MiB are asked for, 100 MiB of the host's memory are free"
    with pytest.raises(CheckpointError, match=words):
        engine_around(args, TINY)


def test_without_a_prefix_cache_a_budget_takes_nothing_and_refuses_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_blocks, "free_bytes", lambda device: 100 * MIB)
    kv = {"host_budget_mb": 1 << 20, "prefix_cache": False}
    args = AppArgs.model_validate({"engine": {"device": "cpu", "max_num_seqs": 2, "kv": kv}})
    engine = engine_around(args, TINY)
    assert engine.kv.tier.n_slots == 0
    assert engine.copies.store is None
    asked = {"engine": {"device": "cpu", "max_num_seqs": 2, "kv": {"prefix_cache": False}}}
    without = engine_around(AppArgs.model_validate(asked), TINY)
    assert engine.facts.kv_blocks == without.facts.kv_blocks


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_the_plan_of_a_card_says_what_lies_on_the_host(dtype: str) -> None:
    checkpoint = random_checkpoint(SHAPES["3b"], CPU)
    engine = {"kv": {"host_budget_mb": 2048, "dtype": dtype}, "max_num_seqs": 4}
    args = AppArgs.model_validate({"model": {"path": "random"}, "engine": engine})
    plan = plan_for(args, checkpoint, Card(8192 * MIB), 86)
    kind = torch.int8 if dtype == "int8" else torch.float16
    each = kv_bytes_per_block(checkpoint.config, kind, 16)
    slots = 2048 * MIB // each
    assert plan.host == (slots, slots * each)
    assert plan.as_dict()["host"] == slots * each
    line = next(line for line in render(plan).splitlines() if line.startswith("on the host"))
    assert f"page-locked: {slots} evicted blocks, {16 * slots} tokens" in line
    off = AppArgs.model_validate({"model": {"path": "random"}, "engine": {"max_num_seqs": 4}})
    without = plan_for(off, checkpoint, Card(8192 * MIB), 86)
    assert without.host == (0, 0)
    assert "on the host" not in render(without)
    if dtype == "auto":
        assert (without.kv_blocks, without.planned) == (plan.kv_blocks, plan.planned)


def test_an_engine_as_the_server_builds_it_has_the_slots_of_its_budget() -> None:
    args = AppArgs.model_validate(
        {"engine": {"device": "cpu", "max_num_seqs": 2, "kv": {"host_budget_mb": 3}}}
    )
    engine = engine_around(args, TINY)
    each = engine.facts.kv_block_bytes
    assert engine.kv.tier.n_slots == engine.facts.kv_host_blocks == 3 * MIB // each
    assert engine.copies.store is not None
    assert engine.copies.store.nbytes == engine.facts.kv_host_blocks * each
