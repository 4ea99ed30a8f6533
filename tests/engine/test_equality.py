"""The text does not depend on how it was scheduled. The hash model's tokens come from the KV that
the engine kept for it, so a wrong block anywhere is a wrong text here.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.messages import Cancel, Evict, Flag, Limit
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import CLIENT, Driver

SHARED = tuple(range(300, 340))


def prompts(n: int, seed: int = 1) -> list[tuple[int, ...]]:
    """Of 1 to 90 tokens; every third begins with the same 40, two are equal."""
    draw = random.Random(seed)
    made: list[tuple[int, ...]] = []
    for index in range(n):
        own = tuple(draw.randrange(900) for _ in range(draw.randint(1, 50)))
        made.append((*SHARED, *own) if index % 3 == 0 else own)
    made[-1] = made[0]
    return made


def assert_right(driver: Driver, runner: HashRunner, asked: list[tuple[int, ...]], n: int) -> None:
    for rid, prompt in enumerate(asked):
        assert driver.tokens(rid) == runner.expected(prompt, n), f"request {rid}"
        assert driver.end(rid) is Flag.LENGTH


@pytest.mark.parametrize("partial", [1, 4])
@pytest.mark.parametrize("chunk", [16, 64, 4096])
@pytest.mark.parametrize("cache", ["off", "cold", "warm"])
def test_chunks_partial_prefills_and_cache(chunk: int, partial: int, cache: str) -> None:
    runner = HashRunner()
    engine = make_engine(
        runner,
        kv_blocks=600,
        prefix_cache=cache != "off",
        prefill_chunk_tokens=chunk,
        max_partial_prefills=partial,
    )
    asked = prompts(12)
    driver = Driver(engine)
    if cache == "warm":
        for rid, prompt in enumerate(asked):
            driver.submit(1000 + rid, prompt, 12)
        driver.run()
    for rid, prompt in enumerate(asked):
        driver.submit(rid, prompt, 12)
    driver.run()
    assert_right(driver, runner, asked, 12)
    cached = [driver.heard[CLIENT, rid].usage.cached_tokens for rid in range(12)]
    if cache == "warm":
        assert cached == [(len(prompt) - 1) // 4 * 4 for prompt in asked]
    elif cache == "off":
        assert cached == [0] * 12
    driver.assert_all_free()


def test_a_prompt_of_whole_blocks_twice_recomputes_one_token() -> None:
    """B-05."""
    runner = HashRunner()
    driver = Driver(make_engine(runner))
    for rid in (1, 2):
        driver.submit(rid, range(16), 5)
        driver.run()
        assert driver.tokens(rid) == runner.expected(range(16), 5)
    assert driver.heard[CLIENT, 2].usage.cached_tokens == 12


@pytest.mark.parametrize("kv_blocks", [26, 32, 40])
def test_preemption_changes_no_token(kv_blocks: int) -> None:
    """A pool far too small for all: recompute is exact."""
    runner = HashRunner()
    engine = make_engine(runner, kv_blocks=kv_blocks, prefill_chunk_tokens=16)
    asked = prompts(10, seed=3)
    driver = Driver(engine)
    for rid, prompt in enumerate(asked):
        assert driver.submit(rid, prompt[:60], 30) is None
    driver.run()
    assert engine.scheduler.stats.preemptions > 0
    assert_right(driver, runner, [prompt[:60] for prompt in asked], 30)
    driver.assert_all_free()


def test_a_requeued_request_goes_on_with_the_same_text() -> None:
    runner = HashRunner()
    engine = make_engine(runner)
    driver = Driver(engine)
    for rid in range(4):
        driver.submit(rid, (rid, 2, 3), 20)

    def evict(step: int) -> None:
        if step in (3, 7, 8, 15):
            engine.evict(CLIENT, Evict(2, requeue=True))

    driver.run(evict)
    assert_right(driver, runner, [(rid, 2, 3) for rid in range(4)], 20)
    assert Flag.REQUEUED in driver.heard[CLIENT, 2].flags
    assert engine.metrics.value("evicted_total") == 4


def test_an_evicted_request_ends_oom_and_frees_its_blocks_at_once() -> None:
    runner = HashRunner()
    engine = make_engine(runner)
    driver = Driver(engine)
    for rid in range(8):
        driver.submit(rid, (rid, *range(20)), 20)
    for _ in range(6):
        driver.step()
    held = len(engine.scheduler.get((CLIENT, 5)).blocks)  # type: ignore[union-attr]
    free = engine.kv.n_free
    engine.evict(CLIENT, Evict(5))
    assert engine.kv.n_free == free + held
    driver.run()
    heard = driver.heard[CLIENT, 5]
    assert heard.end is Flag.OOM
    assert heard.code == "out_of_memory"
    assert heard.extras[-1].blocks_needed == held
    assert heard.extras[-1].blocks_free == free + held
    for rid in set(range(8)) - {5}:
        assert driver.tokens(rid) == runner.expected((rid, *range(20)), 20)
    driver.assert_all_free()


def test_halving_the_pool_loses_nobody() -> None:
    """decisions.md section 4: limit shrinks without a restart, and memory really comes back."""
    runner = HashRunner()
    engine = make_engine(runner, kv_blocks=120)
    driver = Driver(engine)
    asked = [(rid, *range(30)) for rid in range(12)]
    for rid, prompt in enumerate(asked):
        driver.submit(rid, prompt, 30)

    def limit(step: int) -> None:
        if step == 10:
            assert engine.elastic.n_blocks > 60
            assert engine.limit(Limit(kv_fraction=0.5)) is None
        if step == 20:
            assert engine.kv.capacity == 60
        if step == 60:
            engine.limit(Limit(kv_fraction=1.0, max_num_seqs=3, prefill_chunk_tokens=8))

    driver.run(limit)
    assert_right(driver, runner, asked, 30)
    assert engine.scheduler.stats.preemptions > 0
    driver.assert_all_free()


def test_tensors_follow_a_smaller_pool() -> None:
    runner = HashRunner()
    engine = make_engine(runner, kv_blocks=120)
    driver = Driver(engine)
    for rid in range(6):
        driver.submit(rid, (rid, *range(40)), 4)
    driver.run()
    assert engine.elastic.n_blocks > 12
    engine.limit(Limit(kv_fraction=0.1))
    driver.submit(99, range(10), 4)
    driver.run()
    assert engine.elastic.n_blocks == engine.kv.capacity == 12


def test_memory_starts_small_and_grows_with_use() -> None:
    runner = HashRunner()
    engine = make_engine(runner, kv_blocks=500)
    assert engine.elastic.n_blocks == 4
    driver = Driver(engine)
    driver.submit(1, range(30), 4)
    driver.run()
    assert engine.elastic.n_blocks == 16
    assert driver.tokens(1) == runner.expected(range(30), 4)


def test_a_device_with_less_memory_than_promised_serves_what_fits() -> None:
    """The pool promises 200 blocks, the device has 30: nobody is lost, nobody is wrong."""
    runner = HashRunner()
    runner.max_blocks = 30
    engine = make_engine(runner, kv_blocks=200)
    driver = Driver(engine)
    asked = [(rid, *range(30)) for rid in range(8)]
    for rid, prompt in enumerate(asked):
        driver.submit(rid, prompt, 20)
    driver.run()
    assert_right(driver, runner, asked, 20)
    assert engine.scheduler.stats.preemptions > 0
    runner.max_blocks = 100
    driver.submit(99, range(300), 20)
    driver.run()
    assert driver.tokens(99) == runner.expected(range(300), 20)
    driver.assert_all_free()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_may_need_more_than_there_is_keeps_nobody_from_ending(depth: int) -> None:
    """Blocks of the prefix cache are the last to be taken, so a pool that went on promising what a
    live request may come to need gave out the one block that does not exist, for ever."""
    runner = HashRunner()
    engine = make_engine(runner, kv_blocks=40, depth=depth, max_num_seqs=4)
    driver = Driver(engine)
    asked = [(rid, *range(6)) for rid in range(6)]
    driver.submit(9, range(7), 40, ignore_eos=True)
    for rid, prompt in enumerate(asked):
        driver.submit(rid, prompt, 5)
    driver.step()
    runner.max_blocks = engine.elastic.n_blocks
    assert runner.max_blocks == 8
    driver.run()
    assert_right(driver, runner, asked, 5)
    heard = driver.heard[CLIENT, 9]
    assert heard.end is Flag.OOM
    assert heard.tokens == runner.expected(range(7), 40)[: len(heard.tokens)]
    assert len(heard.tokens) == 8 * 4 + 1 - 7
    driver.assert_all_free()


def test_the_pool_is_whole_again_for_the_next_request_whatever_ended_the_last() -> None:
    """A cut pool was made whole by the end of a step only: after a cancel the next request heard
    that it was too long."""
    runner = HashRunner()
    engine = make_engine(runner, kv_blocks=40)
    driver = Driver(engine)
    runner.max_blocks = 8
    for rid in (1, 2):
        driver.submit(rid, (rid, *range(20)), 9)
    driver.step()
    assert engine.kv.capacity == 8
    for rid in (1, 2):
        engine.cancel(CLIENT, Cancel(rid))
    runner.max_blocks = None
    assert driver.submit(3, range(100), 20) is None
    driver.run()
    assert driver.tokens(3) == runner.expected(range(100), 20)


def test_one_request_larger_than_the_device_ends_oom_alone() -> None:
    runner = HashRunner()
    runner.max_blocks = 30
    engine = make_engine(runner, kv_blocks=200)
    driver = Driver(engine)
    driver.submit(1, range(400), 20)
    driver.submit(2, range(20), 20)
    driver.run()
    assert driver.end(1) is Flag.OOM
    assert driver.heard[CLIENT, 1].extras[-1].blocks_needed > 30
    assert driver.tokens(2) == runner.expected(range(20), 20)
    driver.assert_all_free()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kv_blocks=st.integers(30, 80),
    chunk=st.sampled_from([3, 16, 64]),
    partial=st.sampled_from([1, 4]),
    seqs=st.sampled_from([2, 8]),
)
def test_any_schedule_gives_the_same_text(
    seed: int, kv_blocks: int, chunk: int, partial: int, seqs: int
) -> None:
    """B-06 on the engine: shared prefixes, a full pool, requests that keep coming."""
    runner, draw = HashRunner(), random.Random(seed)
    engine = make_engine(
        runner,
        kv_blocks=kv_blocks,
        prefill_chunk_tokens=chunk,
        max_partial_prefills=partial,
        max_num_seqs=seqs,
    )
    driver = Driver(engine, check=False)
    asked: dict[int, tuple[tuple[int, ...], int]] = {}

    def arrive(step: int) -> None:
        if len(asked) < 20 and draw.random() < 0.4:
            start = draw.choice([0, 100, 200])
            prompt = (*range(start, start + draw.randint(1, 40)), draw.randrange(900))
            asked[len(asked)] = (prompt, draw.randint(1, 20))
            rid = len(asked) - 1
            assert driver.submit(rid, prompt, asked[rid][1], priority=draw.randint(0, 2)) is None

    arrive(-1)
    driver.run(arrive)
    for rid, (prompt, n) in asked.items():
        assert driver.tokens(rid) == runner.expected(prompt, n)
    engine.scheduler.check()
    driver.assert_all_free()
