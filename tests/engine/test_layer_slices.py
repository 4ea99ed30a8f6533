"""A long prompt in ranges of layers beside streams: the text of whole chunks, whatever happens."""

from __future__ import annotations

import random

import pytest

from configs.schema import FaultRule
from engine_actor.load.tiny import write_tiny
from engine_actor.messages import Cancel
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import Loaded, load, texts

SLICED = {"prefill_chunk_tokens": 16, "prefill_slice_tokens": 4, "prefix_cache": False}
LONG = tuple(range(40))


@pytest.mark.parametrize("mode", ["serial", "mixed"])
def test_a_stream_goes_on_while_a_chunk_is_half_way(mode: str) -> None:
    runner = HashRunner(n_layers=8)
    engine = make_engine(runner, overlap_mode=mode, **SLICED)
    driver = Driver(engine)
    driver.submit(0, (1, 2, 3), 60)
    driver.step()
    driver.submit(1, LONG, 2)
    before = len(driver.tokens(0))
    while not driver.tokens(1):
        driver.step()
    steps = len(driver.tokens(0)) - before
    assert steps == 4 + 4 + 2 == 40 // 4
    driver.run()
    assert driver.tokens(1) == runner.expected(LONG, 2)
    assert driver.tokens(0) == runner.expected((1, 2, 3), 60)
    value = engine.metrics.value
    assert value("computed_prompt_tokens_total") == 3 + 40
    assert engine.metrics.count("prefill_chunk_tokens") == (1 + 3 if mode == "serial" else 1 + 10)
    assert value("prefill_decode_overlap_steps") == steps
    driver.assert_all_free()


@pytest.mark.parametrize("stage", ["prepare", "launch", "sample", "finish"])
@pytest.mark.parametrize("nth", range(1, 9))
def test_a_fault_in_any_range_costs_nobody_anything(stage: str, nth: int) -> None:
    """S-42: the chunk begins again, whole and small."""
    runner = HashRunner(n_layers=8)
    rule = FaultRule(stage=stage, request="r1", times=nth)  # type: ignore[arg-type]
    engine = make_engine(runner, faults=(rule,), **SLICED)
    driver = Driver(engine)
    driver.submit(0, (1, 2, 3), 60)
    driver.step()
    driver.submit(1, LONG, 2)
    driver.run()
    assert driver.tokens(0) == runner.expected((1, 2, 3), 60)
    if nth <= 3:
        assert driver.tokens(1) == runner.expected(LONG, 2)
    driver.assert_all_free()


def test_a_request_that_is_cancelled_half_way_leaves_nothing() -> None:
    runner = HashRunner(n_layers=8)
    engine = make_engine(runner, **SLICED)
    driver = Driver(engine)
    driver.submit(0, (1, 2, 3), 30)
    driver.step()
    driver.submit(1, LONG, 2)
    driver.step()
    assert runner.live_bytes() > 0
    engine.cancel(CLIENT, Cancel(1))
    driver.step()
    assert runner.live_bytes() == 0
    driver.submit(2, LONG, 2)
    driver.run()
    assert driver.tokens(2) == runner.expected(LONG, 2)
    driver.assert_all_free()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(write_tiny(tmp_path_factory.mktemp("slices"), "llama", seed=4), "exact")


@pytest.mark.parametrize("burst", [None, 60])
def test_slices_and_bursts_give_the_tokens_of_whole_chunks(tiny: Loaded, burst: int | None) -> None:
    draw = random.Random(5)
    crowd = [[draw.randrange(3, 250) for _ in range(draw.randint(1, 90))] for _ in range(8)]
    cut = {"prefill_slice_tokens": 20, "prefill_burst_tokens": burst}
    sliced, whole = (
        texts(tiny.engine(prefill_chunk_tokens=64, **settings), crowd, 12) for settings in (cut, {})
    )
    assert sliced == whole
    assert sliced == [texts(tiny.engine(), [prompt], 12)[0] for prompt in crowd]
