"""Steps launched ahead of the host on a real device: the synchronising twin's tokens, and a launch
that waits for nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from engine_actor.core.plan import StepPlan
from engine_actor.core.sequence import Key
from engine_actor.engine import Engine
from engine_actor.messages import Cancel, Evict, Flag
from engine_actor.work.step import OpenStep
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import Loaded, texts
from tests.engine_gpu.late_streams import prompts

pytestmark = pytest.mark.gpu

CHUNK = 16


def engine_of(loaded: Loaded, ahead: bool, **config: Any) -> Engine:
    settings = {"prefill_chunk_tokens": CHUNK, "async_steps": ahead}
    return loaded.engine(**(settings | config))


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"temperature": 0.7, "seed": 3, "presence_penalty": 0.8, "repetition_penalty": 1.2},
        {"logprobs": 2, "min_tokens": 8},
    ],
)
@pytest.mark.parametrize("kv_blocks", [600, 40])
def test_the_synchronising_twins_tokens_in_any_crowd(
    on_gpu: Loaded, sampling: dict[str, Any], kv_blocks: int
) -> None:
    """40 blocks hold only a part of the crowd at once, so that some are preempted."""
    crowd = prompts(16)
    twin, ahead = (
        texts(engine_of(on_gpu, each, kv_blocks=kv_blocks), crowd, 24, **sampling)
        for each in (False, True)
    )
    assert ahead == twin


def test_cancels_and_evictions_cost_the_others_nothing(on_gpu: Loaded) -> None:
    crowd = prompts(12)
    right = texts(engine_of(on_gpu, ahead=False), crowd, 20)
    engine = engine_of(on_gpu, ahead=True)
    assert engine.depth == 1
    driver = Driver(engine)
    for rid, prompt in enumerate(crowd):
        driver.submit(rid, prompt, 20, ignore_eos=True)
        driver.submit(100 + rid, prompt[::-1], 64, ignore_eos=True)

    def disturb(step: int) -> None:
        if step % 7 == 3:
            engine.cancel(CLIENT, Cancel(100 + step // 7))
        if step % 11 == 5:
            engine.evict(CLIENT, Evict(step // 11, requeue=True))

    driver.run(disturb)
    driver.assert_all_free()
    assert [driver.tokens(rid) for rid in range(len(crowd))] == right
    assert driver.end(100) is Flag.CANCELLED


@pytest.mark.parametrize("model", ["on_gpu", "on_graphs"])
def test_a_launch_waits_for_nothing(model: str, request: pytest.FixtureRequest) -> None:
    """Once everything is compiled, no step of a crowd makes the host wait as it is launched: with
    the general ops, and with the kernels and graphs of a layer."""
    loaded = request.getfixturevalue(model)
    engine = engine_of(loaded, ahead=True)
    assert texts(engine, prompts(8), 12)
    launch = engine._steps.launch
    said: set[str] = set()

    def watched(plan: StepPlan, void: frozenset[Key] = frozenset()) -> OpenStep:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                return launch(plan, void)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            kinds = f"{bool(plan.prefill)} chunks, {bool(plan.decode)} rows"
            said.update(f"{kinds}: {w.filename}:{w.lineno}" for w in caught)

    engine._steps.launch = watched  # type: ignore[method-assign]
    engine.kv.reset_prefix_cache()
    assert texts(engine, prompts(8), 12)
    assert said == set()
