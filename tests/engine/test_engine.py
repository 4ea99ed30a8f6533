"""The plain engine: the door, the counters of each mode, status, limits, deadlines, logprobs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from engine_actor.core.clock import ManualClock
from engine_actor.core.params import SamplingParams
from engine_actor.engine import Engine
from engine_actor.loop import Heartbeat
from engine_actor.messages import Cancel, Flag, Limit, Submit
from engine_actor.status import engine_status
from engine_actor.work.pair import Fence, NoFence, SerialPair
from engine_actor.work.streams import StreamPair
from engine_actor.work.timing import ClockTimer, Timer
from tests.doubles.scripted_runner import HashRunner, ScriptedRunner, make_engine
from tests.engine.driver import CLIENT, Driver

CPU = torch.device("cpu")
BEAT = Heartbeat(alive=True, busy_seconds=0.0, steps=3, fatal=None)


class NamedStreams:
    """A device with two streams, as far as the pair can see; everything really runs in order."""

    def current(self) -> str:
        return "default"

    def wait(self, waiter: str, awaited: str) -> None: ...

    def record(self, stream: str) -> Fence:
        return NoFence()

    def entered(self, stream: str) -> AbstractContextManager[object]:
        return nullcontext()

    def new_timer(self) -> Timer:
        return ClockTimer()


def two_streams() -> StreamPair[str]:
    return StreamPair(NamedStreams(), "decode", "prefill", SerialPair(CPU))


def overlapping(engine: Engine, runner: HashRunner) -> Driver:
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
    return driver


CHUNKS = {"prefill_chunk_tokens": 4, "max_partial_prefills": 1, "prefix_cache": False}


def test_serial_counts_the_logical_overlap_only() -> None:
    """S-45, S-58 to S-60: 3 prompts of 16 in chunks of 4 are 12 prefill steps beside decodes."""
    runner = HashRunner()
    engine = make_engine(runner, **CHUNKS)
    overlapping(engine, runner)
    value = engine.metrics.value
    assert value("prefill_steps_total") == 1 + 12
    assert value("prefill_decode_overlap_steps") == 12
    assert value("prefill_decode_stream_overlap_steps") == 0
    assert value("prefill_decode_mixed_forward_steps") == 0
    assert value("prefill_decode_overlapped_seconds") == 0
    assert engine.metrics.count("prefill_chunk_seconds") == 13
    assert engine.metrics.count("decode_step_seconds") == value("decode_steps_total")


def test_prefill_decode_stream_overlap_runs_both_forwards() -> None:
    """S-69 with streams that are names: one prefill step for a stream that then decodes, eleven for
    a prompt that comes in beside it."""
    runner = HashRunner()
    engine = make_engine(runner, pair=two_streams(), **CHUNKS)
    driver = Driver(engine)
    driver.submit(0, (1, 2, 3, 4), 40)
    driver.step()
    driver.submit(1, range(44), 2)
    driver.run()
    assert driver.tokens(0) == runner.expected((1, 2, 3, 4), 40)
    assert driver.tokens(1) == runner.expected(tuple(range(44)), 2)
    status = engine_status(engine, epoch=1, heartbeat=BEAT, clients=1)
    assert status["prefill_steps_total"] == 12
    assert status["prefill_decode_overlap_steps"] == 11
    assert status["prefill_decode_stream_overlap_steps"] == 11
    assert status["prefill_decode_mixed_forward_steps"] == 0
    assert status["prefill_decode_overlap"] is status["prefill_decode_overlap_effective"] is True


def test_several_partial_prefills_are_one_prefill_step() -> None:
    runner = HashRunner()
    engine = make_engine(runner, prefill_chunk_tokens=12, max_partial_prefills=4)
    driver = Driver(engine)
    for rid in range(3):
        driver.submit(rid, (rid, *range(7)), 1)
    driver.run()
    assert engine.metrics.value("prefill_steps_total") == 2
    assert engine.metrics.value("computed_prompt_tokens_total") == 24


def test_status_says_what_an_operator_asks_first() -> None:
    """S-61: the switch, what it comes to here and why, the counters, memory, queue, config."""
    runner = HashRunner()
    engine = make_engine(runner, max_num_seqs=7)
    driver = Driver(engine)
    driver.submit(1, range(30), 4)
    driver.step()
    status = engine_status(engine, epoch=42, heartbeat=BEAT, clients=2)
    assert status["epoch"] == 42
    assert status["prefill_decode_overlap"] is True
    assert status["prefill_decode_overlap_effective"] is False
    assert "the CPU has no streams" in status["prefill_decode_overlap_reason"]
    assert status["prefill_decode_overlap_steps"] == 0
    assert status["prefill_decode_stream_overlap_steps"] == 0
    assert status["prefill_steps_total"] == 1
    assert status["queue"]["running"] == 1
    assert status["queue"]["max_num_seqs"] == 7
    assert status["kv"]["blocks_total"] == 64
    assert status["kv"]["blocks_free"] == 64 - 8
    assert status["memory"]["kv_bytes"] == engine.elastic.n_blocks * 1024
    assert status["config"]["kv"]["block_tokens"] == 4
    assert status["heartbeat"] == {"alive": True, "busy_seconds": 0.0, "steps": 3, "fatal": None}
    assert status["model"]["vocab_size"] == 997


@pytest.mark.parametrize(
    ("switch", "streams", "effective", "reason"),
    [
        (True, True, True, None),
        (False, False, False, "switched off (enable_prefill_decode_overlap: false)"),
    ],
)
def test_status_tells_the_switch_from_its_effect(
    switch: bool, streams: bool, effective: bool, reason: str | None
) -> None:
    pair = two_streams() if streams else None
    engine = make_engine(HashRunner(), pair=pair, enable_prefill_decode_overlap=switch)
    status = engine_status(engine, 1, BEAT, 0)
    assert status["prefill_decode_overlap"] is switch
    assert status["prefill_decode_overlap_effective"] is effective
    assert status["prefill_decode_overlap_reason"] == reason


@pytest.mark.parametrize(
    ("prompt", "sampling", "code"),
    [
        ((), {}, "invalid"),
        ((1, 997), {}, "invalid"),
        ((1,), {"logit_bias": ((997, 1.0),)}, "invalid"),
        ((1,), {"stop_token_ids": (-1,)}, "invalid"),
        (range(60), {"max_tokens": 200}, "context_length_exceeded"),
    ],
)
def test_the_door_refuses_with_a_code(
    prompt: tuple[int, ...], sampling: dict[str, object], code: str
) -> None:
    """B-08, B-14: at once, and the next request is fine."""
    runner = HashRunner()
    engine = make_engine(runner)
    driver = Driver(engine)
    assert driver.submit(1, prompt, **sampling) == code  # type: ignore[arg-type]
    assert engine.metrics.value("admission_rejections_total", code) == 1
    assert driver.submit(1, (1, 2), 3) is None
    driver.run()
    assert driver.tokens(1) == runner.expected((1, 2), 3)


def test_a_full_queue_is_overloaded_and_a_draining_engine_unavailable() -> None:
    engine = make_engine(HashRunner(), max_queue=2, max_num_seqs=1)
    driver = Driver(engine)
    assert [driver.submit(rid, (1, 2)) for rid in range(4)] == [None, None, None, "overloaded"]
    assert driver.submit(0, (1, 2)) == "invalid"
    engine.draining = True
    assert driver.submit(9, (1, 2)) == "unavailable"


def test_a_deadline_ends_a_request_wherever_it_stands() -> None:
    clock, runner = ManualClock(), HashRunner()
    engine = make_engine(runner, clock=clock, max_num_seqs=1)
    driver = Driver(engine)
    params = SamplingParams(max_tokens=100, temperature=0.0)
    for rid in (1, 2):
        assert engine.submit(CLIENT, Submit(rid, (rid,), params, deadline_ms=1500)) is None
    for _ in range(5):
        driver.step()
    clock.advance(2.0)
    driver.run()
    for rid in (1, 2):
        assert driver.end(rid) is Flag.ERROR
        assert driver.heard[CLIENT, rid].code == "deadline_exceeded"
    assert driver.tokens(1) == runner.expected((1,), 5)
    driver.assert_all_free()


def test_a_client_may_call_its_own_deadline() -> None:
    engine = make_engine(HashRunner())
    driver = Driver(engine)
    driver.submit(1, (1, 2), 50)
    driver.step()
    engine.cancel(CLIENT, Cancel(1, "deadline"))
    driver.run()
    assert driver.end(1) is Flag.CANCELLED
    assert driver.heard[CLIENT, 1].code == "deadline_exceeded"


def test_stop_tokens_end_with_the_token_that_stopped() -> None:
    runner = ScriptedRunner(300, {(5, 6): (10, 11, 12, 13), (7,): (20,)}, eos=0)
    engine = make_engine(runner)
    driver = Driver(engine)
    driver.submit(1, (5, 6), 20, stop_token_ids=(12,))
    driver.submit(2, (7,), 20)
    driver.submit(3, (7,), 3, ignore_eos=True)
    driver.submit(4, (5, 6), 20, min_tokens=4, stop_token_ids=(11,))
    driver.run()
    assert (driver.tokens(1), driver.end(1)) == ([10, 11, 12], Flag.STOP)
    assert driver.heard[CLIENT, 1].extras[-1].stop_token == 12
    assert driver.heard[CLIENT, 1].usage.completion_tokens == 3
    assert (driver.tokens(2), driver.end(2)) == ([20, 0], Flag.STOP)
    assert driver.tokens(3) == [20, 0, 0]
    assert driver.end(3) is Flag.LENGTH
    assert 11 not in driver.tokens(4)[:3]


def test_logprobs_come_with_their_tokens() -> None:
    runner = HashRunner()
    driver = Driver(make_engine(runner))
    driver.submit(1, (5, 6, 7), 4, logprobs=2)
    driver.run()
    entries = [entry for extra in driver.heard[CLIENT, 1].extras for entry in extra.logprobs]
    assert [entry.token for entry in entries] == driver.tokens(1)
    assert all(entry.top[0] == (entry.token, entry.logprob) for entry in entries)
    assert all(len(entry.top) == 2 for entry in entries)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("kv_blocks", [64, 14])
def test_echo_scores_the_prompt_once(max_tokens: int, kv_blocks: int) -> None:
    """Also where preemption computes the prompt twice; max_tokens 0 ends without a token."""
    runner = HashRunner()
    engine = make_engine(runner, kv_blocks=kv_blocks, prefill_chunk_tokens=8)
    driver = Driver(engine)
    prompts = {rid: (rid, *range(20, 20 + 5 * rid)) for rid in range(1, 6)}
    for rid, prompt in prompts.items():
        driver.submit(rid, prompt, max_tokens, prompt_logprobs=0)
    driver.submit(9, (1, 2), 40)
    driver.run()
    for rid, prompt in prompts.items():
        heard = driver.heard[CLIENT, rid]
        entries = [entry for extra in heard.extras for entry in extra.prompt_logprobs]
        assert [entry.token for entry in entries] == list(prompt[1:])
        assert driver.tokens(rid) == runner.expected(prompt, max_tokens)
        assert driver.end(rid) is Flag.LENGTH
    driver.assert_all_free()


def test_limits_are_checked_and_live() -> None:
    engine = make_engine(HashRunner())
    assert engine.limit(Limit(kv_fraction=1.5)) == "invalid"
    assert engine.limit(Limit(max_num_seqs=2, prefill_chunk_tokens=8)) is None
    driver = Driver(engine)
    for rid in range(5):
        driver.submit(rid, (rid, *range(20)), 6)
    while engine.has_work:
        driver.step()
        assert engine.scheduler.stats.running <= 2


def test_times_of_a_request_are_counted_once() -> None:
    clock, runner = ManualClock(), HashRunner()
    engine = make_engine(runner, clock=clock)
    driver = Driver(engine)
    driver.submit(1, (1, 2, 3), 5)
    driver.run(lambda step: clock.advance(0.5))
    text = engine.metrics.text()
    assert engine.metrics.count("ttft_seconds") == 1
    assert engine.metrics.count("inter_token_latency_seconds") == 4
    assert "inter_token_latency_seconds_sum 2\n" in text
    assert "time_per_output_token_seconds_sum 0.5\n" in text
    assert "e2e_latency_seconds_sum 2\n" in text
    assert engine.metrics.value("requests_finished_total", "length") == 1
    assert engine.metrics.value("generation_tokens_total") == 5
