"""What the engine counts and says of itself: two overlaps apart, prefill steps, times of a request.

S-45, S-55, S-58 to S-61, S-64, S-87, S-88.
"""

from __future__ import annotations

import pytest

from engine_actor.core.clock import ManualClock
from engine_actor.loop import Heartbeat
from engine_actor.status import engine_status
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import Driver

QUIET = Heartbeat(alive=True, busy_seconds=0.0, steps=0, fatal=None)


def _decode_beside_a_prompt_of_three_chunks(enable_overlap: bool) -> Driver:
    """One stream decodes; a prompt of 40 tokens comes in chunks of 16."""
    engine = make_engine(
        HashRunner(),
        prefill_chunk_tokens=16,
        prefix_cache=False,
        enable_prefill_decode_overlap=enable_overlap,
    )
    driver = Driver(engine)
    driver.submit(1, range(4), max_tokens=12)
    driver.step()
    driver.submit(2, range(100, 140), max_tokens=2)
    driver.run()
    return driver


@pytest.mark.parametrize("enable_overlap", [True, False])
def test_a_serial_step_with_both_works_counts_as_logical_overlap_only(enable_overlap):
    """On a CPU, whatever the switch: the cycle is shared, the device's time is not."""
    metrics = _decode_beside_a_prompt_of_three_chunks(enable_overlap).engine.metrics
    assert metrics.value("prefill_steps_total") == 1 + 3
    assert metrics.value("prefill_decode_overlap_steps") == 3
    assert metrics.value("prefill_decode_stream_overlap_steps") == 0
    assert metrics.value("prefill_decode_mixed_forward_steps") == 0
    assert metrics.value("prefill_decode_overlapped_seconds") == 0


def test_each_work_is_timed_once():
    """S-55: a step with both works is one value in each histogram."""
    snapshot = _decode_beside_a_prompt_of_three_chunks(True).engine.metrics.snapshot()
    assert snapshot["prefill_chunk_seconds_count"] == 4
    assert snapshot["decode_step_seconds_count"] == snapshot["decode_steps_total"] == 11
    # Request 1 samples its first token in its prefill, and 11 more by decode. Request 2 samples its
    # second in a step that request 1 shares.
    assert snapshot["generation_tokens_total"] == 12 + 2
    assert snapshot["prefill_chunk_tokens_sum"] == 4 + 40


@pytest.mark.parametrize(
    ("switch", "reason"),
    [
        (True, "the CPU has no streams: decode runs first, then prefill"),
        (False, "switched off (enable_prefill_decode_overlap: false)"),
    ],
)
def test_status_says_the_switch_and_what_it_comes_to(switch, reason):
    engine = _decode_beside_a_prompt_of_three_chunks(switch).engine
    status = engine_status(engine, 1, QUIET, clients=2)
    assert status["prefill_decode_overlap"] is switch
    assert status["prefill_decode_overlap_effective"] is False
    assert status["prefill_decode_overlap_reason"] == reason
    assert status["prefill_decode_overlap_steps"] == 3
    assert status["prefill_decode_stream_overlap_steps"] == 0
    assert status["prefill_steps_total"] == 4


def test_first_tokens_and_the_times_between_tokens_are_measured():
    """S-64, on a clock that moves a quarter of a second between steps."""
    clock = ManualClock()
    driver = Driver(make_engine(HashRunner(), clock=clock))
    clock.advance(1.0)
    driver.submit(1, range(4), max_tokens=3)
    clock.advance(0.5)  # in the queue
    driver.run(after_step=lambda step: clock.advance(0.25))
    snapshot = driver.engine.metrics.snapshot()
    assert snapshot["queue_seconds_sum"] == pytest.approx(0.5)
    assert snapshot["ttft_seconds_sum"] == pytest.approx(0.5)
    assert snapshot["inter_token_latency_seconds_count"] == 2
    assert snapshot["inter_token_latency_seconds_sum"] == pytest.approx(0.5)
    assert snapshot["time_per_output_token_seconds_sum"] == pytest.approx(0.25)
    assert snapshot["e2e_latency_seconds_sum"] == pytest.approx(1.0)
