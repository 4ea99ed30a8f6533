"""Pipeline depth 1 on a device that runs behind the host: the texts of depth 0, whatever happens.

decisions.md section 3: the host reads a step after the next one was launched; a stop or a cancel is
seen one step late, and no token of that step ever leaves.
"""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.schema import FaultRule
from engine_actor.engine import Engine
from engine_actor.messages import Cancel, Evict, Flag, Limit
from engine_actor.work.pair import SerialPair
from engine_actor.work.streams import StreamPair
from tests.doubles.queued_device import CPU, QueuedRunner, queued_engine
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import CLIENT, Driver
from tests.work.recorded import RecordedStreams

EOS = 5
STAGES = ("prepare", "launch", "sample", "finish")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_eos": True},
    {"temperature": 2.0, "seed": 11},
    {"temperature": 2.0, "seed": 12, "top_k": 40, "min_tokens": 4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "temperature": 2.0, "seed": 13},
    {"logprobs": 3},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"temperature": 1.9},
)


@dataclass
class Crowd:
    """Requests with the step they arrive in, and what befalls them: (step, deed, rid)."""

    requests: list[tuple[int, tuple[int, ...], int, dict[str, Any]]]
    deeds: list[tuple[int, str, int]] = field(default_factory=list)
    kv_blocks: int = 64
    vocab_size: int = 61

    def play(self, engine: Engine) -> Driver:
        driver = Driver(engine)
        last = max([step for step, *_ in (*self.requests, *self.deeds)], default=0)
        step = 0
        while engine.has_work or step <= last:
            for rid, (at, prompt, n_tokens, sampling) in enumerate(self.requests):
                if at == step:
                    assert driver.submit(rid, prompt, n_tokens, **sampling) is None
            for at, deed, rid in self.deeds:
                if at == step:
                    DEEDS[deed](engine, rid)
            driver.step()
            step += 1
            assert step < 5000
        driver.assert_all_free()
        return driver


DEEDS = {
    "cancel": lambda engine, rid: engine.cancel(CLIENT, Cancel(rid)),
    "stop_string": lambda engine, rid: engine.cancel(CLIENT, Cancel(rid, "stop_string")),
    "requeue": lambda engine, rid: engine.evict(CLIENT, Evict(rid, requeue=True)),
    "evict": lambda engine, rid: engine.evict(CLIENT, Evict(rid)),
    "shrink": lambda engine, rid: engine.limit(Limit(kv_fraction=0.93, max_num_seqs=2)),
    "fault": lambda engine, rid: engine.faults.add(FaultRule(stage=STAGES[rid % 4], times=2)),
    "restore": lambda engine, rid: engine.limit(Limit(kv_fraction=1.0, max_num_seqs=8)),
}
ENDS = {"cancel": Flag.CANCELLED, "stop_string": Flag.STOP, "evict": Flag.OOM}


def random_crowd(draw: random.Random, kv_blocks: int) -> Crowd:
    requests = []
    for _ in range(draw.randint(1, 9)):
        prompt = tuple(draw.randrange(61) for _ in range(draw.choice((1, 3, 8, 17, 30))))
        prompt = (7,) * draw.choice((0, 0, 8)) + prompt
        sampling = draw.choice(SAMPLINGS)
        n_tokens = draw.randint(sampling.get("min_tokens", 0), 14)
        requests.append((draw.randint(0, 12), prompt, n_tokens, sampling))
    deeds = [
        (draw.randint(0, 25), draw.choice(list(DEEDS)), draw.randrange(len(requests)))
        for _ in range(draw.randint(0, 6))
    ]
    return Crowd(requests, deeds, kv_blocks)


def engines(crowd: Crowd, pace: Any, **config: Any) -> tuple[Engine, Engine, QueuedRunner]:
    """The synchronising twin, and the engine under test on a device of that pace."""
    shape = {"vocab_size": crowd.vocab_size, "eos": None}
    common = {
        "kv_blocks": crowd.kv_blocks,
        "max_num_seqs": 5,
        "prefill_chunk_tokens": 12,
        "max_partial_prefills": 3,
        # A rule that never fires keeps the hook in place for those that are armed later.
        "faults": (FaultRule(stage="prepare", request="nobody"),),
    } | config
    twin = make_engine(HashRunner(**shape), depth=0, **common)
    runner = QueuedRunner(pace, **shape)
    late = queued_engine(runner, **common)
    for engine in (twin, late):
        # A token that ends a text is one of the vocabulary: stops are seen one step late.
        object.__setattr__(engine._steps._context, "eos_token_ids", frozenset({EOS}))
        limits = engine.scheduler.limits
        object.__setattr__(limits, "eos_token_ids", frozenset({EOS}))
    return twin, late, runner


def assert_same(crowd: Crowd, twin: Driver, late: Driver) -> None:
    """Whoever was not ended from outside heard the same; the others a beginning of it."""
    touched = {rid for _, deed, rid in crowd.deeds if deed in ENDS}
    for rid in range(len(crowd.requests)):
        one, other = twin.heard[CLIENT, rid], late.heard[CLIENT, rid]
        if rid in touched:
            ends = {ENDS[deed] for _, deed, at in crowd.deeds if deed in ENDS and at == rid}
            # A stop string that overtakes its request is a cancel like any other.
            assert other.end in {*ends, Flag.CANCELLED, Flag.STOP, Flag.LENGTH}
            n = min(len(one.tokens), len(other.tokens))
            assert one.tokens[:n] == other.tokens[:n]
            continue
        assert other.tokens == one.tokens, f"request {rid}"
        assert other.end is one.end
        for name in ("logprobs", "prompt_logprobs"):
            assert scores(other, name) == scores(one, name)


def scores(heard: Any, name: str) -> list[Any]:
    return [entry for extra in heard.extras for entry in getattr(extra, name)]


@pytest.mark.parametrize("kv_blocks", [14, 64])
@pytest.mark.parametrize("pace", ["late", "prompt", "uneven"])
@pytest.mark.parametrize("seed", range(6))
def test_any_crowd_gets_the_texts_of_the_synchronising_twin(
    seed: int, pace: str, kv_blocks: int
) -> None:
    """Greedy and seeded, penalties, logprobs, prompt logprobs; preemptions, cancels, limits, and
    memory that is short for a moment in any verb."""
    draw = random.Random(seed)
    crowd = random_crowd(draw, kv_blocks)
    paces = {"late": lambda: 0, "prompt": lambda: 9, "uneven": lambda: draw.randint(0, 3)}
    twin, late, runner = engines(crowd, paces[pace])
    assert_same(crowd, crowd.play(twin), crowd.play(late))
    gc.collect()
    assert runner.live_bytes() == 0


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32), paces=st.lists(st.integers(0, 4), min_size=1), tight=st.booleans()
)
def test_any_crowd_at_any_pace(seed: int, paces: list[int], tight: bool) -> None:
    crowd = random_crowd(random.Random(seed), 14 if tight else 64)
    turn = iter(range(10**9))
    twin, late, _ = engines(crowd, lambda: paces[next(turn) % len(paces)])
    assert_same(crowd, crowd.play(twin), crowd.play(late))


def test_the_next_step_is_launched_before_the_last_one_is_read() -> None:
    """A lone stream: from its first token on the device always has one step more than was read."""
    runner = QueuedRunner(vocab_size=997)
    engine = queued_engine(runner)
    driver = Driver(engine)
    driver.submit(1, (1, 2, 3), 6)
    heard = []
    while engine.has_work:
        launched = runner.launches
        driver.step()
        heard.append((runner.launches - launched, len(driver.tokens(1))))
    assert heard == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (0, 6)]
    assert driver.tokens(1) == runner.expected((1, 2, 3), 6)


def test_depth_0_on_such_a_device_waits_for_every_step() -> None:
    runner = QueuedRunner(vocab_size=997)
    engine = queued_engine(runner, depth=0)
    driver = Driver(engine)
    driver.submit(1, (1, 2, 3), 4)
    for n_tokens in range(1, 5):
        driver.step()
        assert len(driver.tokens(1)) == n_tokens
    assert driver.tokens(1) == runner.expected((1, 2, 3), 4)
    assert not engine.has_work


def test_a_cancel_with_a_step_in_flight_frees_its_blocks_at_that_step_s_end() -> None:
    """decisions.md section 4; nothing sampled after the cancel is heard."""
    runner = QueuedRunner()
    engine = queued_engine(runner)
    driver = Driver(engine)
    for rid in (1, 2):
        driver.submit(rid, (rid, 2, 3), 30)
    for _ in range(5):
        driver.step()
    n_heard = len(driver.tokens(1))
    free = engine.kv.n_free
    engine.cancel(CLIENT, Cancel(1))
    assert engine.kv.n_free == free, "the step in flight still writes its blocks"
    driver.step()
    assert engine.kv.n_free > free
    driver.run()
    assert (driver.end(1), len(driver.tokens(1))) == (Flag.CANCELLED, n_heard)
    assert driver.tokens(2) == runner.expected((2, 2, 3), 30)
    driver.assert_all_free()


def test_a_penalty_waits_for_the_token_it_reads_and_a_plain_row_does_not() -> None:
    runner = QueuedRunner()
    engine = queued_engine(runner)
    driver = Driver(engine)
    driver.submit(1, (1, 2, 3), 8, repetition_penalty=1.2)
    driver.step()
    while engine.has_work:
        n_launched, n_read = runner.launches, len(driver.tokens(1))
        driver.step()
        assert runner.launches <= n_launched + 1
        assert len(driver.tokens(1)) <= n_read + 1
    assert len(driver.tokens(1)) == 8
    driver.assert_all_free()


def test_losing_the_device_answers_everybody_and_forgets_the_open_step() -> None:
    runner = QueuedRunner()
    engine = queued_engine(runner)
    driver = Driver(engine)
    driver.submit(1, (1, 2), 10)
    driver.step()

    def lose(rows: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner.before_logits = lose
    with pytest.raises(Exception, match="illegal memory access"):
        driver.step()
    events = engine.abort_all("engine_restarted")
    (end,) = events.by_client[CLIENT]
    assert (end.flag, end.extra.error_code) == (Flag.ERROR, "engine_restarted")
    gc.collect()
    assert engine._pipeline.n_open == 0


def test_nothing_is_sampled_before_the_join_of_its_step() -> None:
    """The seed's order, on the device, by trace through the engine: both works wait for the stream
    that samples, it waits for both, then it samples; the host waits for the steps in their order.
    """
    log: list[str] = []
    pair = StreamPair(RecordedStreams(log), "decode", "prefill", SerialPair(CPU))
    runner = HashRunner()
    engine = make_engine(runner, pair=pair, depth=1, prefill_chunk_tokens=4, max_partial_prefills=1)
    begin = engine._steps._context.sampler.begin

    def traced(logits: Any, rows: Any, *more: Any) -> Any:
        log.append("sample")
        return begin(logits, rows, *more)

    engine._steps._context.sampler.begin = traced  # type: ignore[method-assign]
    driver = Driver(engine)
    driver.submit(0, (1, 2, 3), 30)
    for _ in range(3):
        driver.step()
    for rid in (1, 2):
        driver.submit(rid, (rid, *range(15)), 3)
    driver.run()
    assert engine.metrics.value("prefill_decode_stream_overlap_steps") == 8
    launches = [index for index, entry in enumerate(log) if entry == "decode waits for default"]
    for number, index in enumerate(launches):
        end = launches[number + 1] if number + 1 < len(launches) else len(log)
        order = [entry for entry in log[index:end] if not entry.startswith(("enter", "leave"))]
        join = [
            "prefill waits for default",
            "default waits for prefill",
            "default waits for decode",
        ]
        assert order[1:4] == join
        assert order[4] == "sample"
        recorded = order.index("record default")
        assert set(order[4:recorded]) == {"sample"}
    records = [index for index, entry in enumerate(log) if entry == "record default"]
    waits = [index for index, entry in enumerate(log) if entry == "host waits for default"]
    assert len(waits) == len(records) == 8
    ahead = [wait > later for wait, later in zip(waits, records[1:], strict=False)]
    assert sum(ahead) >= 6, "the next step is launched before the host waits for this one"
    assert driver.tokens(0) == runner.expected((1, 2, 3), 30)
