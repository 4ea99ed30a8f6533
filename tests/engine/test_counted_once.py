"""Every request ends once, every prompt is scored once, every count is of what was really done:
also where a step fails, is run again, or breaks off."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema import FaultRule
from engine_actor.messages import Cancel, Evict, Flag, Limit
from tests.doubles.queued_device import QueuedRunner, queued_engine
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import CLIENT, Driver

LONG = tuple(range(40))


@pytest.mark.parametrize("stage", ["launch", "sample", "finish"])
@pytest.mark.parametrize("after", range(5))
def test_a_prompt_is_scored_once_whichever_range_fails(stage: Any, after: int) -> None:
    """A range that fails as it is finished has the next one launched behind it already: what that
    one scores is scored again by the chunk that takes their place."""
    runner = QueuedRunner(n_layers=3)
    nobody = FaultRule(stage=stage, request="nobody")
    engine = queued_engine(
        runner, prefill_chunk_tokens=64, prefill_slice_tokens=14, faults=(nobody,)
    )
    driver = Driver(engine)
    driver.submit(0, (1, 2), 40)
    for _ in range(3):
        driver.step()
    driver.submit(1, LONG, 3, prompt_logprobs=0)
    for _ in range(after):
        driver.step()
    engine.faults.add(FaultRule(stage=stage, request="r1"))
    driver.run()
    assert engine.faults.fired == 1
    assert driver.tokens(1) == runner.expected(LONG, 3)
    entries = [one for e in driver.heard[CLIENT, 1].extras for one in e.prompt_logprobs]
    assert [entry.token for entry in entries] == list(LONG[1:])
    assert driver.tokens(0) == runner.expected((1, 2), 40)
    driver.assert_all_free()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_that_breaks_off_leaves_nobody_without_an_end(depth: int) -> None:
    """A fault of ours between what the scheduler ends and what the clients hear."""
    engine = make_engine(HashRunner(), depth=depth)
    driver = Driver(engine)
    for rid, n_tokens in enumerate((2, 2, 9)):
        driver.submit(rid, (rid, 2, 3), n_tokens)
    commit = engine.scheduler.commit

    def broken(outcome: Any) -> Any:
        if commit(outcome):
            raise RuntimeError("a fault of ours")
        return ()

    engine.scheduler.commit = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="of ours"):
        driver.run()
    events = engine.abort_all("engine_restarted").by_client[CLIENT]
    assert sorted(event.rid for event in events) == [0, 1, 2]
    assert {event.flag for event in events} == {Flag.ERROR}
    assert {event.extra.error_code for event in events} == {"engine_restarted"}
    assert engine.metrics.value("requests_finished_total", "error") == 3


def test_who_was_sent_back_is_counted_whoever_did_it() -> None:
    """By an eviction, and by a shrink after which nothing was left to launch."""
    runner = HashRunner()
    engine = make_engine(runner, kv_blocks=40, prefix_cache=False)
    driver = Driver(engine)
    for rid in range(3):
        driver.submit(rid, (rid, *range(15)), 30)
    for _ in range(4):
        driver.step()
    engine.evict(CLIENT, Evict(2, requeue=True))
    for _ in range(4):
        driver.step()
    engine.limit(Limit(kv_fraction=0.3))
    driver.run()
    preempted = engine.scheduler.stats.preemptions
    assert preempted >= 2
    assert engine.metrics.value("preemptions_total") == preempted
    for rid in range(3):
        assert driver.tokens(rid) == runner.expected((rid, *range(15)), 30)


def test_a_prompt_is_counted_once_whether_or_not_a_token_follows() -> None:
    """A score has no token, a cancel may come before the first, and who never ran is none."""
    engine = make_engine(HashRunner(), prefill_chunk_tokens=8, max_num_seqs=2)
    driver = Driver(engine)
    driver.submit(0, LONG, 0, prompt_logprobs=0)
    driver.submit(1, (1, 2), 3)
    driver.submit(2, (3, 4), 3)
    driver.step()
    engine.cancel(CLIENT, Cancel(0))
    engine.cancel(CLIENT, Cancel(2))
    driver.run()
    driver.submit(3, LONG[:20], 0, prompt_logprobs=0)
    driver.run()
    value = engine.metrics.value
    assert value("requests_received_total") == 4
    assert value("prompt_tokens_total") == 40 + 2 + 20
    assert engine.metrics.count("request_prompt_tokens") == 3
    assert engine.metrics.count("queue_seconds") == 3
    assert engine.metrics.count("ttft_seconds") == 1
    driver.submit(4, LONG[:20], 2)
    driver.submit(5, LONG[:20], 2)
    driver.run()
    assert value("cached_prompt_tokens_total") == 16 + 16
    assert value("prompt_tokens_total") == 62 + 40


@pytest.mark.parametrize("mode", ["serial", "mixed"])
def test_prompt_tokens_that_were_not_computed_are_not_counted(mode: str) -> None:
    """A chunk that is given up counts nothing, one that was cut short what it came to."""
    always = FaultRule(stage="launch", request="r1", times="always")
    engine = make_engine(HashRunner(), faults=(always,), overlap_mode=mode)
    driver = Driver(engine)
    driver.submit(0, (1, 2, 3), 9)
    driver.step()
    driver.submit(1, LONG, 3)
    driver.run()
    assert driver.end(1) is Flag.OOM
    assert engine.metrics.value("computed_prompt_tokens_total") == 3
    assert engine.metrics.count("prefill_chunk_tokens") == 1
