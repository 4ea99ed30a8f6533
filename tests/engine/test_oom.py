"""The four out-of-memory cases, 25 times each, prefill and decode mixed: nobody else notices, in
steps that the host waits for and in steps that are launched ahead of it.

decisions.md section 9; B-22; S-42.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch

from configs.schema import FaultRule
from engine_actor.core.plan import StepOutcome
from engine_actor.core.scheduler import Finished
from engine_actor.core.sequence import FinishReason, SeqState
from engine_actor.engine import Engine
from engine_actor.errors import FatalDeviceError
from engine_actor.messages import Flag
from engine_actor.model.batch_inputs import BatchInputs
from tests.doubles.queued_device import QueuedRunner, queued_engine
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import CLIENT, Driver

REPEATS = 25
N_REQUESTS = 7
N_TOKENS = 12
STAGES = ("prepare", "launch", "sample", "finish")
DEPTHS = pytest.mark.parametrize("depth", [0, 1])
SEEDS = pytest.mark.parametrize("seed", range(REPEATS))


class Scene:
    """Requests that arrive two by two, so that steps hold prefill and decode together; faults are
    armed once some of both are there."""

    def __init__(self, seed: int, depth: int, **rule: object) -> None:
        self.draw = random.Random(seed)
        pace = random.Random(seed)
        self.runner = QueuedRunner(lambda: pace.randint(0, 2)) if depth else HashRunner()
        self.rule = FaultRule(stage=STAGES[seed % 4], **rule)  # type: ignore[arg-type]
        # A rule that never fires keeps the hook in place; the real one is armed in the middle.
        never = FaultRule(stage="prepare", request="nobody")
        settings = {"faults": (never,), "prefill_chunk_tokens": 12, "max_partial_prefills": 3}
        self.engine: Engine = (
            queued_engine(self.runner, **settings)
            if isinstance(self.runner, QueuedRunner)
            else make_engine(self.runner, **settings)  # type: ignore[arg-type]
        )
        self.driver = Driver(self.engine)
        self.asked = [
            tuple(self.draw.randrange(900) for _ in range(self.draw.randint(8, 40)))
            for _ in range(N_REQUESTS)
        ]
        self.priorities = [self.draw.randint(0, 2) for _ in range(N_REQUESTS)]
        self.fault_step = self.draw.randint(3, 8)
        self.was_mixed = False

    def play(self) -> None:
        arrived = 0
        step = 0
        while self.engine.has_work or arrived < N_REQUESTS:
            if step % 2 == 0 and arrived < N_REQUESTS:
                prompt, priority = self.asked[arrived], self.priorities[arrived]
                code = self.driver.submit(arrived, prompt, N_TOKENS, priority=priority)
                assert code is None
                arrived += 1
            if step == self.fault_step:
                self.arm()
            states = {seq.state for seq in self.engine.scheduler.running}
            self.was_mixed |= {SeqState.PREFILL, SeqState.DECODE} <= states
            self.driver.step()
            step += 1
            assert step < 3000

    def arm(self) -> None:
        self.engine.faults.add(self.rule)

    def assert_others_right(self, *ended: int) -> None:
        assert self.was_mixed
        for rid, prompt in enumerate(self.asked):
            right = self.runner.expected(prompt, N_TOKENS)
            if rid in ended:
                heard = self.driver.heard[CLIENT, rid]
                assert (heard.end, heard.code) == (Flag.OOM, "out_of_memory")
                assert heard.extras[-1].blocks_needed > 0
                assert heard.extras[-1].blocks_free >= 0
                assert heard.tokens == right[: len(heard.tokens)]
            else:
                assert self.driver.tokens(rid) == right, f"request {rid}"
                assert self.driver.end(rid) is Flag.LENGTH
        self.driver.assert_all_free()
        gc.collect()
        assert self.runner.live_bytes() == 0
        assert self.engine.metrics.value("oom_isolated_total") == len(ended)


@DEPTHS
@SEEDS
def test_transient_costs_nobody_anything(seed: int, depth: int) -> None:
    scene = Scene(seed, depth, times=1 + seed % 2)
    scene.play()
    scene.assert_others_right()
    assert scene.engine.faults.fired == 1 + seed % 2
    assert scene.engine.metrics.value("oom_retries_total") > 0


@DEPTHS
@SEEDS
def test_always_for_one_request_ends_only_that_one(seed: int, depth: int) -> None:
    guilty = seed % N_REQUESTS
    scene = Scene(seed, depth, request=f"r{guilty}", times="always")
    scene.fault_step = 2 * guilty + 2
    scene.play()
    scene.assert_others_right(guilty)


@DEPTHS
@SEEDS
def test_always_above_n_rows_ends_nobody(seed: int, depth: int) -> None:
    scene = Scene(seed, depth, min_rows=2 + seed % 4, times="always")
    scene.play()
    scene.assert_others_right()
    assert scene.engine.metrics.value("oom_retries_total") > 0


@DEPTHS
@SEEDS
def test_always_ends_the_youngest_of_the_lowest_priority_until_the_rest_pass(
    seed: int, depth: int
) -> None:
    """The device stays full until two have ended, then there is room again."""
    scene = Scene(seed, depth, times="always")
    ended: list[int] = []
    expected: list[int] = []
    commit, scheduler = scene.engine.scheduler.commit, scene.engine.scheduler

    def watched_commit(outcome: StepOutcome) -> tuple[Finished, ...]:
        parts = (*outcome.plan.prefill, *outcome.plan.decode)
        void = scheduler.void(outcome.plan.step)
        starved = [part.key[1] for part in parts if part.key not in void]
        finished = commit(outcome)
        if finished and finished[0].reason is FinishReason.OOM:
            ended.append(finished[0].seq.key[1])
            expected.append(max(starved, key=lambda rid: (scene.priorities[rid], rid)))
        if len(ended) == 2:
            scene.engine.faults.clear()
        return finished

    scheduler.commit = watched_commit  # type: ignore[method-assign]
    scene.play()
    assert len(ended) == 2
    assert ended == expected
    scene.assert_others_right(*ended)


def test_the_report_is_in_the_next_batch_with_blocks_needed_and_free() -> None:
    runner = HashRunner()
    rule = FaultRule(stage="launch", request="r2", times="always")
    engine = make_engine(runner, faults=(rule,))
    driver = Driver(engine)
    driver.submit(1, range(20), 8)
    driver.submit(2, range(40, 60), 8)
    events = driver.step()
    (blamed,) = [event for event in events.by_client[CLIENT] if event.flag is Flag.OOM]
    assert blamed.rid == 2
    assert blamed.extra.error_code == "out_of_memory"
    assert blamed.extra.blocks_needed == 5
    assert blamed.extra.blocks_free == 64 - 10
    assert blamed.extra.usage is not None
    driver.run()
    assert driver.tokens(1) == runner.expected(range(20), 8)


def test_an_allocation_that_really_fails_is_isolated_too() -> None:
    """B-22: the third of five asks the allocator for a pebibyte in its prefill."""
    runner = HashRunner()
    engine = make_engine(runner, prefill_chunk_tokens=64, max_partial_prefills=5)
    driver = Driver(engine)
    for rid in range(1, 6):
        driver.submit(rid, (rid, *range(10)), 8)

    def allocate(inputs: BatchInputs) -> None:
        if 3 in inputs.ids[inputs.positions == 0]:
            torch.empty(2**50, dtype=torch.uint8)

    runner.before_layers = allocate
    driver.run()
    assert driver.end(3) is Flag.OOM
    for rid in (1, 2, 4, 5):
        assert driver.tokens(rid) == runner.expected((rid, *range(10)), 8)
    driver.assert_all_free()
    assert runner.live_bytes() == 0


def test_a_request_s_own_error_ends_it_and_nothing_else() -> None:
    """An exception in finish is the request's where it fails alone: code internal_error."""
    runner = HashRunner()
    engine = make_engine(runner)
    driver = Driver(engine)
    for rid in range(4):
        driver.submit(rid, (rid, 5, 6), 10)
    sampler = engine._steps._context.sampler
    original = sampler.sample

    def sample(logits: object, rows: list) -> list:  # type: ignore[type-arg]
        if any(row.key == (CLIENT, 2) and row.position == 7 for row in rows):
            raise ZeroDivisionError("odd parameters")
        return original(logits, rows)  # type: ignore[arg-type]

    sampler.sample = sample  # type: ignore[method-assign]
    driver.run()
    assert driver.end(2) is Flag.ERROR
    assert driver.heard[CLIENT, 2].code == "internal_error"
    assert driver.tokens(2) == runner.expected((2, 5, 6), 4)
    for rid in (0, 1, 3):
        assert driver.tokens(rid) == runner.expected((rid, 5, 6), 10)
    driver.assert_all_free()


def test_a_lost_device_goes_through() -> None:
    runner = HashRunner()
    engine = make_engine(runner)
    driver = Driver(engine)
    driver.submit(1, (1, 2), 10)

    def lose(rows: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner.before_logits = lose
    with pytest.raises(FatalDeviceError):
        driver.step()
    events = engine.abort_all("engine_restarted")
    (end,) = events.by_client[CLIENT]
    assert (end.flag, end.extra.error_code) == (Flag.ERROR, "engine_restarted")
