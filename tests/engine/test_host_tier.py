"""Evicted prefixes that come back from the host: the texts are those of an engine that computes
them once more, whatever the device's pace, and only because of both waits.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_actor.engine import Engine
from engine_actor.load.tiny import write_tiny
from engine_actor.loop import Heartbeat
from engine_actor.messages import Cancel, Limit
from engine_actor.status import engine_status
from tests.doubles.queued_device import QueuedRunner, queued_engine
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import BLOCK, Loaded, load

VOCAB = 97
TRUNKS = [[(7 * t + 3 * i) % VOCAB for i in range(24)] for t in range(4)]
SETTINGS: dict[str, Any] = {"kv_blocks": 16, "max_num_seqs": 4, "prefill_chunk_tokens": 16}


def asked(seed: int, n: int = 40) -> list[tuple[list[int], int]]:
    """Prompts that begin with one of four trunks, which no pool of 16 blocks of 4 holds at once."""
    draw = random.Random(seed)
    return [
        (draw.choice(TRUNKS) + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 5))],
         draw.randint(1, 9))
        for _ in range(n)
    ]  # fmt: skip


def played(engine: Engine, seed: int, cancels: bool = False) -> Driver:
    draw = random.Random(seed)
    driver = Driver(engine)
    for rid, (prompt, n_tokens) in enumerate(asked(seed)):
        assert driver.submit(rid, prompt, n_tokens, ignore_eos=True) is None
        for _ in range(draw.randint(0, 6)):
            driver.step()
        if cancels and draw.random() < 0.3:
            engine.cancel(CLIENT, Cancel(rid))
    driver.run()
    driver.assert_all_free()
    return driver


def right(seed: int) -> list[list[int]]:
    runner = HashRunner(vocab_size=VOCAB)
    return [runner.expected(prompt, n_tokens) for prompt, n_tokens in asked(seed)]


@pytest.mark.parametrize("host_slots", [1, 5, 100])
def test_texts_with_the_tier_are_those_without(host_slots: int) -> None:
    engine = make_engine(HashRunner(vocab_size=VOCAB), host_slots=host_slots, **SETTINGS)
    driver = played(engine, 1)
    assert [driver.tokens(rid) for rid in range(40)] == right(1)
    twin = make_engine(HashRunner(vocab_size=VOCAB), **SETTINGS)
    played(twin, 1)
    value, before = engine.metrics.snapshot(), twin.metrics.snapshot()
    assert before["kv_host_hit_tokens_total"] == before["kv_host_bytes_out_total"] == 0
    assert value["kv_host_blocks_total"] == host_slots
    assert value["kv_host_bytes_out_total"] > 0
    if host_slots == 100:
        assert value["kv_host_hit_tokens_total"] > 100
        assert value["kv_host_bytes_back_total"] == value["kv_host_hit_tokens_total"] / 4 * 1024
        assert value["cached_prompt_tokens_total"] > before["cached_prompt_tokens_total"]
        computed = "computed_prompt_tokens_total"
        assert value[computed] < before[computed]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [0, 1])
def test_a_device_at_any_pace_gives_the_right_texts(depth: int, seed: int) -> None:
    pace = random.Random(seed)
    choices = ((0,), (0, 0, 1), (0, 1, 3, 9))[seed % 3]
    runner = QueuedRunner(lambda: pace.choice(choices), vocab_size=VOCAB)
    more = {"host_slots": (100, 9)[seed // 3], "few_blocks": (0, 2)[seed % 2]}
    engine = queued_engine(runner, depth, **more, **SETTINGS)
    driver = played(engine, seed)
    assert [driver.tokens(rid) for rid in range(40)] == right(seed)
    assert engine.kv.tier.n_copied_back > 0


def regrown(without: tuple[str, str] | None) -> tuple[list[list[int]], list[list[int]]]:
    """Texts found and right of prompts whose blocks come back into memory that has just been taken,
    and is cleared by the works' stream.
    """
    runner = QueuedRunner(lambda: 0, vocab_size=VOCAB)
    # Copies that nobody holds back are early.
    runner.copy_queue._pace = lambda: 9
    engine = queued_engine(runner, 1, host_slots=100, without=without, **SETTINGS)
    driver = Driver(engine)
    prompts = [[*trunk, 1] for trunk in TRUNKS]
    for rid, prompt in enumerate(prompts):
        driver.submit(rid, prompt, 2, ignore_eos=True)
        driver.run()
    engine.limit(Limit(kv_fraction=0.5))
    driver.submit(10, [5] * 30, 2, ignore_eos=True)
    driver.run()
    assert engine.elastic.n_blocks == 8
    engine.limit(Limit(kv_fraction=1.0))
    driver.submit(11, [6, 7] * 4, 9, ignore_eos=True)
    driver.step()
    assert engine.elastic.n_blocks == 16
    back = engine.kv.tier.n_copied_back
    driver.submit(12, prompts[0], 6, ignore_eos=True)
    driver.run()
    assert engine.kv.tier.n_copied_back == back + 6
    wanted = [runner.expected([6, 7] * 4, 9), runner.expected(prompts[0], 6)]
    return [driver.tokens(11), driver.tokens(12)], wanted


def test_copies_wait_for_the_works_and_what_they_leave_behind() -> None:
    """Fences proved: copies that do not wait come before the memory is there."""
    found, wanted = regrown(None)
    assert found == wanted
    with pytest.raises((AssertionError, IndexError)):
        regrown(("copies", "works"))


def test_works_wait_for_copies() -> None:
    """Fences proved: with it the same seed gives the right texts, whatever the pace."""
    runner = QueuedRunner(lambda: 0, vocab_size=VOCAB)
    without = ("works", "copies")
    engine = queued_engine(runner, 1, host_slots=100, without=without, **SETTINGS)
    with pytest.raises(AssertionError, match="KV of a wrong position"):
        played(engine, 0)


@pytest.mark.parametrize("seed", range(3))
def test_cancels_in_between_lose_nothing(seed: int) -> None:
    pace = random.Random(seed)
    runner = QueuedRunner(lambda: pace.choice((0, 0, 1, 5)), vocab_size=VOCAB)
    engine = queued_engine(runner, 1, host_slots=30, **SETTINGS)
    driver = played(engine, seed, cancels=True)
    for rid, text in enumerate(right(seed)):
        tokens = driver.tokens(rid)
        assert tokens == text[: len(tokens)]
    assert engine.kv.tier.n_copied_back > 0


def test_memory_that_is_out_and_a_pool_that_shrinks_in_between() -> None:
    runner = QueuedRunner(lambda: 1, vocab_size=VOCAB)
    engine = queued_engine(runner, 1, host_slots=100, **SETTINGS)
    driver = Driver(engine)
    refused = set()
    for rid, (prompt, n_tokens) in enumerate(asked(5)):
        code = driver.submit(rid, prompt, n_tokens, ignore_eos=True)
        assert code in (None, "context_length_exceeded")
        if code is not None:
            refused.add(rid)
        driver.step()
        if rid == 10:
            engine.limit(Limit(kv_fraction=0.6))
        if rid == 20:
            runner.max_blocks = engine.elastic.n_blocks
            engine.limit(Limit(kv_fraction=1.0))
        if rid == 30:
            runner.max_blocks = None
    driver.run()
    driver.assert_all_free()
    assert len(refused) < 10
    for rid, text in enumerate(right(5)):
        if rid not in refused:
            assert driver.tokens(rid) == text
    assert engine.kv.tier.n_copied_back > 0


def test_status_says_what_the_host_keeps() -> None:
    engine = make_engine(HashRunner(vocab_size=VOCAB), host_slots=20, **SETTINGS)
    played(engine, 2)
    host = engine_status(engine, 1, Heartbeat(True, 0.0, 0, None), 0)["kv"]["host"]
    assert host["blocks_total"] == 20
    assert 0 < host["blocks_used"] <= 20
    assert host["blocks_out"] == host["blocks_used"] + host["blocks_dropped"]
    assert host["bytes"] == engine.copies.store.nbytes > 0
    off = make_engine(HashRunner(vocab_size=VOCAB), **SETTINGS)
    host = engine_status(off, 1, Heartbeat(True, 0.0, 0, None), 0)["kv"]["host"]
    assert (host["blocks_total"], host["bytes"]) == (0, 0)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(write_tiny(tmp_path_factory.mktemp("tier"), "llama", seed=4, packed=True), "exact")


def test_real_forward_passes_read_what_was_restored(exact: Loaded) -> None:
    draw = random.Random(8)
    trunks = [[draw.randrange(3, 270) for _ in range(4 * BLOCK)] for _ in range(3)]
    prompts = [trunks[i % 3] + [draw.randrange(3, 270) for _ in range(5)] for i in range(9)]

    def texts(**more: Any) -> tuple[list[list[int]], Engine]:
        engine = exact.engine(kv_blocks=10, max_num_seqs=2, prefill_chunk_tokens=32, **more)
        driver = Driver(engine)
        for rid, prompt in enumerate(prompts):
            driver.submit(rid, prompt, 6, ignore_eos=True)
            driver.run()
        driver.assert_all_free()
        return [driver.tokens(rid) for rid in range(len(prompts))], engine

    found, engine = texts(host_slots=40)
    assert found == texts()[0]
    assert engine.kv.tier.n_copied_back > 12
    host = engine.copies.store
    assert host.nbytes == 40 * sum(exact.runner.kv.block_bytes)
