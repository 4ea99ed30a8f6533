"""Whatever happens to a crowd at once: each text is a beginning of the one its request has alone,
each request ends once, every count is right, and the engine serves the next one.

What test_async_steps.py leaves out, since it compares with a twin that would need the same luck:
memory that runs out for good and comes back, errors, deadlines, clients that go, ranges of layers,
mixed forwards, long shared prefixes, prompts that end at the last position of the context.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.schema import FaultRule
from engine_actor.core.clock import ManualClock
from engine_actor.core.overlap_policy import FixedPolicy, Sharing
from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import OverlapMode
from engine_actor.engine import Engine
from engine_actor.messages import Cancel, CancelReason, Evict, Flag, Limit, Submit
from tests.doubles.queued_device import QueuedRunner, queued_engine
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import CLIENT, Driver, Heard

VOCAB, LAYERS, CONTEXT = 61, 3, 40
STAGES = ("prepare", "launch", "sample", "finish")
SAMPLINGS: tuple[tuple[tuple[str, Any], ...], ...] = (
    (),
    (("ignore_eos", True),),
    (("temperature", 2.0), ("seed", 11)),
    (("temperature", 2.0), ("seed", 12), ("top_k", 40)),
    (("presence_penalty", 1.5), ("frequency_penalty", 0.5)),
    (("repetition_penalty", 1.3), ("temperature", 2.0), ("seed", 13)),
    (("logprobs", 3),),
    (("prompt_logprobs", 2), ("logprobs", 1)),
    (("prompt_logprobs", 1), ("max_tokens", 0)),
    (("stop_token_ids", (9, 10, 11)),),
)
DEEDS = ("cancel", "stop", "requeue", "evict", "limit", "fault", "error", "full", "free", "forget")


@dataclass(frozen=True)
class Asked:
    """One request. `step`: when it comes. `deadline_ms` by the engine's clock, 10 ms a step."""

    step: int
    prompt: tuple[int, ...]
    params: tuple[tuple[str, Any], ...]
    priority: int
    deadline_ms: int | None

    def submit(self, rid: int) -> Submit:
        params = SamplingParams(**({"temperature": 0.0} | dict(self.params)))
        more = {"priority": self.priority, "deadline_ms": self.deadline_ms, "trace_id": f"r{rid}"}
        return Submit(rid, self.prompt, params, **more)


@cache
def alone(prompt: tuple[int, ...], params: tuple[tuple[str, Any], ...]) -> Heard:
    """The right answer."""
    engine = make_engine(HashRunner(vocab_size=VOCAB, n_layers=LAYERS, eos=None), depth=0)
    driver = Driver(engine)
    assert driver.submit(0, prompt, **dict(params)) is None
    driver.run()
    return driver.heard[CLIENT, 0]


def crowd_of(draw: random.Random) -> list[Asked]:
    trunk = tuple(draw.randrange(VOCAB) for _ in range(24))
    asked = []
    for _ in range(draw.randint(1, 9)):
        tail = tuple(draw.randrange(VOCAB) for _ in range(draw.choice((1, 1, 3, 8, 16))))
        prompt = trunk[: draw.choice((0, 0, 4, 8, 9, 16, 23))] + tail
        most = CONTEXT - len(prompt)
        n_tokens = draw.choice((most, draw.randint(1, min(most, 14))))
        params = {"max_tokens": n_tokens} | dict(draw.choice(SAMPLINGS))
        deadline = draw.choice((None,) * 6 + (50, 300))
        step, priority = draw.randint(0, 12), draw.choice((0, 0, 0, 1, -1))
        asked.append(Asked(step, prompt, tuple(sorted(params.items())), priority, deadline))
    return asked


def engine_of(draw: random.Random, runner: QueuedRunner, clock: ManualClock) -> Engine:
    engine = queued_engine(
        runner,
        depth=draw.choice((0, 1, 1)),
        kv_blocks=draw.choice((12, 14, 20, 64)),
        host_slots=draw.choice((0, 3, 9, 60)),
        few_blocks=draw.choice((0, 2, 32)),
        max_model_len=CONTEXT,
        max_num_seqs=draw.choice((1, 3, 5)),
        prefill_chunk_tokens=draw.choice((3, 12, 64)),
        max_partial_prefills=draw.choice((1, 3)),
        prefill_slice_tokens=draw.choice((None, 2, 5)),
        prefill_burst_tokens=draw.choice((None, 9)),
        clock=clock,
        faults=(FaultRule(stage="prepare", request="nobody"),),
    )
    if draw.random() < 0.3:
        engine.policy = FixedPolicy(Sharing(OverlapMode.MIXED))
    return engine


def befall(draw: random.Random, engine: Engine, runner: QueuedRunner, deed: str, rid: int) -> None:
    match deed:
        case "cancel" | "stop":
            reason: CancelReason = "stop_string" if deed == "stop" else "client"
            engine.cancel(CLIENT, Cancel(rid, reason))
        case "requeue" | "evict":
            engine.evict(CLIENT, Evict(rid, requeue=deed == "requeue"))
        case "limit":
            fraction, count = draw.choice((0.5, 0.9, 1.0)), draw.choice((1, 2, 9))
            engine.limit(Limit(fraction, count, draw.choice((1, 7, 40))))
        case "fault":
            engine.faults.add(FaultRule(stage=draw.choice(STAGES), times=draw.choice((1, 2, 5))))
        case "error":
            runner.before_logits = failing(draw.choice((1, 2)))
        case "full":
            runner.max_blocks = max(engine.elastic.n_blocks, draw.choice((4, 6, 9)))
        case "free":
            runner.max_blocks = None
        case _:
            engine.kv.reset_prefix_cache()


def failing(times: int) -> Callable[[int], None]:
    """A hook that raises so often, of no fault of the memory's."""
    left = iter(range(times))

    def hook(rows: int) -> None:
        if next(left, None) is not None:
            raise ValueError("a kernel that fails")

    return hook


def play(draw: random.Random, asked: list[Asked]) -> tuple[Engine, Driver, QueuedRunner]:
    pace = random.Random(draw.random())
    runner = QueuedRunner(lambda: pace.choice((0, 0, 1, 3, 9)), vocab_size=VOCAB, n_layers=LAYERS)
    clock = ManualClock()
    engine = engine_of(draw, runner, clock)
    deeds = [(draw.randint(0, 30), draw.choice(DEEDS), draw.randrange(len(asked)))
             for _ in range(draw.randint(0, 9))]  # fmt: skip
    driver = Driver(engine)
    last = max([one.step for one in asked] + [step for step, *_ in deeds])
    step = 0
    while engine.has_work or step <= last:
        for rid, one in enumerate(asked):
            if one.step == step:
                code = engine.submit(CLIENT, one.submit(rid))
                assert code in (None, "context_length_exceeded")
                if code is None:
                    driver.heard.setdefault((CLIENT, rid), Heard())
        for at, deed, rid in deeds:
            if at == step:
                befall(draw, engine, runner, deed, rid)
        driver.step()
        clock.advance(0.01)
        step += 1
        assert step < 4000, "nobody gets on"
    driver.assert_all_free()
    return engine, driver, runner


def check(one: Asked, heard: Heard) -> None:
    want = alone(one.prompt, one.params)
    assert heard.end is not None
    assert heard.tokens == want.tokens[: len(heard.tokens)]
    assert scores(heard, "logprobs") == scores(want, "logprobs")[: len(heard.tokens)]
    found, right = scores(heard, "prompt_logprobs"), scores(want, "prompt_logprobs")
    assert found == right[: len(found)]
    by_itself = heard.end is Flag.STOP and heard.extras[-1].stop_token is not None
    if heard.end is Flag.LENGTH or by_itself:
        assert (heard.tokens, heard.end) == (want.tokens, want.end)
        assert found == right


def scores(heard: Heard, name: str) -> list[Any]:
    return [entry for extra in heard.extras for entry in getattr(extra, name)]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_at_once(seed: int) -> None:
    draw = random.Random(seed)
    asked = crowd_of(draw)
    engine, driver, runner = play(draw, asked)
    accepted = [rid for _, rid in driver.heard]
    for rid in accepted:
        check(asked[rid], driver.heard[CLIENT, rid])
    value = engine.metrics.snapshot()
    assert value["generation_tokens_total"] == sum(len(driver.tokens(rid)) for rid in accepted)
    ends = sum(n for name, n in value.items() if name.startswith("requests_finished_total{"))
    assert ends == len(accepted)
    refused = sum(n for name, n in value.items() if name.startswith("admission_rejections_total"))
    assert value["requests_received_total"] == ends + refused == len(asked)
    # Once all is well again, everybody is served as ever.
    engine.faults.clear()
    runner.before_logits = lambda rows: None
    runner.max_blocks = None
    engine.limit(Limit(kv_fraction=1.0))
    after = Driver(engine)
    assert after.submit(500, range(9), 8) is None
    after.run()
    assert after.tokens(500) == alone(tuple(range(9)), (("max_tokens", 8),)).tokens
    assert engine._pipeline.n_open == 0
