"""Nothing is planned behind a long step of prompts before it has ended: whoever comes meanwhile is
in the next one."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_actor import pipeline
from engine_actor.engine import Engine
from engine_actor.errors import FatalDeviceError
from tests.doubles.queued_device import QueuedRunner, queued_engine
from tests.engine.driver import CLIENT, Driver
from tests.engine.test_async_steps import Crowd, assert_same, engines, random_crowd

BURSTS = {
    "prefill_chunk_tokens": 64,
    "prefill_slice_tokens": 6,
    "prefill_burst_tokens": 32,
    "max_partial_prefills": 4,
}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LOOK_S", 0.0)
    monkeypatch.setattr(pipeline, "MOST_LOOKS", 5 * pipeline.LOOKS)


def held_engine(**config: object) -> tuple[Engine, Driver, QueuedRunner]:
    """Behind one step that computes a prompt of 20 tokens, on a device that does nothing yet."""
    runner = QueuedRunner(lambda: 0)
    engine = queued_engine(runner, **(BURSTS | config))  # type: ignore[arg-type]
    driver = Driver(engine)
    driver.submit(0, range(20))
    driver.step()
    assert engine._pipeline.n_open == 1
    return engine, driver, runner


def test_a_prompt_that_comes_during_a_long_step_is_in_the_next() -> None:
    engine, driver, runner = held_engine()
    driver.step()
    assert (engine._pipeline.n_open, engine.scheduler.stats.running) == (1, 1)
    driver.submit(1, range(1, 9))
    driver.submit(2, range(2, 10))
    driver.step()
    assert (engine._pipeline.n_open, engine.scheduler.stats.running) == (1, 1)
    runner.queue.run_to(runner.queue.given)
    driver.step()
    assert len(driver.heard[CLIENT, 0].tokens) == 1
    assert engine._pipeline.n_open == 0
    driver.step()
    (open_step,) = engine._pipeline._open
    assert [slot.key[1] for slot in open_step.plan.decode] == [0]
    assert [chunk.key[1] for chunk in open_step.plan.prefill] == [1, 2]
    driver.run()
    assert [len(driver.tokens(rid)) for rid in range(3)] == [8, 8, 8]


@pytest.mark.parametrize("prompts", [[(3, 3), (4, 3), (5, 3), (6, 3)], [(3, 32)]])
def test_once_a_burst_is_here_it_is_planned_ahead(prompts: list[tuple[int, int]]) -> None:
    engine, driver, _ = held_engine()
    for rid, tokens in prompts:
        driver.submit(rid, range(rid, rid + tokens))
    driver.step()
    assert engine.scheduler.stats.running == 1 + len(prompts)
    assert len(driver.heard[CLIENT, 0].tokens) == 1
    driver.run()


@pytest.mark.parametrize("name", ["prefill_burst_tokens", "prefill_slice_tokens"])
def test_without_bursts_the_next_step_is_planned_ahead(name: str) -> None:
    _, driver, _ = held_engine(**{name: None})
    driver.step()
    assert len(driver.heard[CLIENT, 0].tokens) == 1
    driver.run()


def test_a_device_that_does_not_get_on_is_waited_for() -> None:
    """Where it hangs, the thread hangs in its step, which a watchdog sees."""
    engine, driver, _ = held_engine()
    for _ in range(5):
        assert not driver.step().by_client
    driver.step()
    assert engine._pipeline.n_open == 0
    driver.run()


def test_a_device_that_cannot_say_is_lost() -> None:
    class Lost:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: device-side assert triggered")

        def synchronize(self) -> None:
            raise FatalDeviceError("lost")

    engine, driver, _ = held_engine()
    (step,) = engine._pipeline._open
    object.__setattr__(step.launched, "done", Lost())
    with pytest.raises(FatalDeviceError):
        driver.step()


@given(seed=st.integers(0, 10**9))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_text_is_the_twins(seed: int) -> None:
    draw = random.Random(seed)
    crowd: Crowd = random_crowd(draw, draw.choice((14, 64)))
    twin, late, _ = engines(crowd, lambda: draw.choice((0, 1, 5)), **BURSTS)
    assert_same(crowd, crowd.play(twin), crowd.play(late))
