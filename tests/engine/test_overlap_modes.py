"""Every way to share the device gives the serial twin's text and counts as what it is.

A CPU runs two of the five for real; the others' order is recorded in tests/work/test_sharing.py and
run in tests/engine_gpu/test_overlap_modes.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from configs.schema import FaultRule
from engine_actor.core.plan import OverlapMode
from engine_actor.engine import Engine
from engine_actor.load.tiny import write_tiny
from engine_actor.loop import Heartbeat
from engine_actor.status import engine_status
from engine_actor.work.sharing import NO_STREAMS
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import Driver
from tests.engine.real_engine import Loaded, load, texts

BEAT = Heartbeat(alive=True, busy_seconds=0.0, steps=3, fatal=None)
CHUNKS = {"prefill_chunk_tokens": 4, "max_partial_prefills": 1, "prefix_cache": False}
COUNTERS = (
    "prefill_steps_total",
    "prefill_decode_overlap_steps",
    "prefill_decode_stream_overlap_steps",
    "prefill_decode_mixed_forward_steps",
)


def overlapping(engine: Engine, runner: HashRunner) -> None:
    """One stream decodes while three prompts of 16 tokens go through in chunks of 4."""
    driver = Driver(engine)
    driver.submit(0, (1, 2, 3), 40)
    driver.step()
    for rid in (1, 2, 3):
        driver.submit(rid, (rid, *range(15)), 2)
    driver.run()
    for rid in (1, 2, 3):
        assert driver.tokens(rid) == runner.expected((rid, *range(15)), 2)
    assert driver.tokens(0) == runner.expected((1, 2, 3), 40)


def test_a_mixed_step_is_a_logical_overlap_and_no_stream_overlap() -> None:
    """S-111; its time is in a histogram of its own, so that no second counts twice (S-55)."""
    runner = HashRunner()
    engine = make_engine(runner, overlap_mode="mixed", **CHUNKS)
    overlapping(engine, runner)
    metrics = engine.metrics
    assert [metrics.value(name) for name in COUNTERS] == [13, 12, 0, 12]
    assert metrics.value("prefill_decode_overlap_mode_steps", "mixed") == 12
    assert metrics.value("prefill_decode_overlap_mode_steps", "serial") == 0
    assert metrics.value("prefill_decode_overlapped_seconds") == 0
    assert metrics.count("mixed_forward_seconds") == 12
    assert metrics.count("prefill_chunk_seconds") == 1
    alone = metrics.value("decode_steps_total") - 12
    assert metrics.count("decode_step_seconds") == alone


def test_a_mixed_step_that_fails_once_is_two_works_and_no_mixed_forward() -> None:
    runner = HashRunner()
    fault = FaultRule(stage="launch", min_rows=5, times=1)
    engine = make_engine(runner, overlap_mode="mixed", faults=(fault,), **CHUNKS)
    overlapping(engine, runner)
    assert [engine.metrics.value(name) for name in COUNTERS] == [13, 12, 0, 11]
    assert engine.metrics.count("mixed_forward_seconds") == 11
    assert engine.metrics.count("prefill_chunk_seconds") == 2


@pytest.mark.parametrize("mode", OverlapMode)
def test_status_names_the_mode_and_why_it_is_another(mode: OverlapMode) -> None:
    engine = make_engine(HashRunner(), overlap_mode=mode.value, overlap_max_ctas=7)
    status = engine_status(engine, 1, BEAT, 0)
    can = mode in (OverlapMode.SERIAL, OverlapMode.MIXED)
    assert status["overlap_mode"] == mode.value
    assert status["overlap_mode_effective"] == (mode.value if can else "serial")
    assert status["prefill_decode_overlap_reason"] == (None if can else NO_STREAMS)
    assert status["prefill_decode_overlap_effective"] is (mode is OverlapMode.MIXED)
    assert status["overlap_max_ctas"] is None
    assert status["overlap_stream_priorities"] is None


def test_the_switch_wins_over_the_mode() -> None:
    engine = make_engine(HashRunner(), overlap_mode="mixed", enable_prefill_decode_overlap=False)
    status = engine_status(engine, 1, BEAT, 0)
    assert status["overlap_mode_effective"] == "serial"
    reason = "switched off (enable_prefill_decode_overlap: false)"
    assert status["prefill_decode_overlap_reason"] == reason


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder: Path = write_tiny(tmp_path_factory.mktemp("overlap"), "qwen2", seed=4)
    return load(folder, "exact")


@pytest.mark.parametrize("chunk", [16, 70])
def test_mixed_gives_the_serial_twins_tokens_in_a_crowd(tiny: Loaded, chunk: int) -> None:
    """Exact numerics: token for token, greedy and seeded."""
    draw = random.Random(5)
    crowd = [[draw.randrange(3, 250) for _ in range(draw.randint(1, 90))] for _ in range(8)]
    for sampling in ({}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
        both = []
        for mode in ("serial", "mixed"):
            engine = tiny.engine(prefill_chunk_tokens=chunk, overlap_mode=mode)
            both.append(texts(engine, crowd, 12, **sampling))
            mixed = engine.metrics.value("prefill_decode_mixed_forward_steps")
            assert (mixed > 0) is (mode == "mixed")
        assert both[0] == both[1]


@pytest.mark.parametrize("mode", ["serial", "mixed"])
def test_prompt_logprobs_are_the_same_in_either_mode(tiny: Loaded, mode: str) -> None:
    engine = tiny.engine(prefill_chunk_tokens=16, overlap_mode=mode, max_partial_prefills=1)
    driver = Driver(engine)
    driver.submit(0, range(5, 12), 40, ignore_eos=True)
    while not driver.tokens(0):
        driver.step()
    driver.submit(1, range(20, 60), 2, ignore_eos=True, prompt_logprobs=0)
    driver.run()
    alone = Driver(tiny.engine(prefill_chunk_tokens=64, overlap_mode="serial"))
    alone.submit(1, range(20, 60), 2, ignore_eos=True, prompt_logprobs=0)
    alone.run()
    assert scores(driver) == scores(alone)


def scores(driver: Driver) -> dict[int, float]:
    found = {}
    for extra in driver.heard["c", 1].extras:
        for place, entry in enumerate(extra.prompt_logprobs or ()):
            found[extra.prompt_start + place] = entry.logprob
    assert len(found) == 39
    return found
