"""Decode and prefill on two CUDA streams: really at once, and the serial twin's tokens.

Rows S-53, S-54, S-59, S-69 and S-92 of the seed, bug case B-35.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_actor.core.plan import OverlapMode
from engine_actor.engine import Engine
from engine_actor.messages import Cancel
from engine_actor.status import overlap_reason
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import Loaded, texts
from tests.engine_gpu.crowd import CHUNK, prompts, short_stream_and_long_prompt

pytestmark = pytest.mark.gpu


def counters(engine: Engine) -> dict[str, float]:
    names = (
        "prefill_steps_total",
        "prefill_decode_overlap_steps",
        "prefill_decode_stream_overlap_steps",
        "prefill_decode_overlapped_seconds",
    )
    return {name: engine.metrics.value(name) for name in names}


def engine_of(loaded: Loaded, overlap: bool, **config: Any) -> Engine:
    settings = {"prefill_chunk_tokens": CHUNK, "enable_prefill_decode_overlap": overlap}
    return loaded.engine(**(settings | config))


def test_prefill_decode_stream_overlap_runs_both_forwards(on_gpu: Loaded) -> None:
    engine = engine_of(on_gpu, overlap=True)
    driver = short_stream_and_long_prompt(engine, max_tokens=40)
    seen = counters(engine)
    assert seen["prefill_steps_total"] == 12
    assert seen["prefill_decode_overlap_steps"] == 11
    assert seen["prefill_decode_stream_overlap_steps"] == 11
    assert engine.config.enable_prefill_decode_overlap
    assert overlap_reason(engine) is None
    assert engine.pair.mode is OverlapMode.TWO_STREAMS

    twin = engine_of(on_gpu, overlap=False)
    serial = short_stream_and_long_prompt(twin, max_tokens=40)
    assert [driver.tokens(rid) for rid in (0, 1)] == [serial.tokens(rid) for rid in (0, 1)]
    assert counters(twin) == seen | {
        "prefill_decode_stream_overlap_steps": 0,
        "prefill_decode_overlapped_seconds": 0,
    }
    assert overlap_reason(twin) == "switched off (enable_prefill_decode_overlap: false)"


def test_two_streams_give_the_serial_twins_tokens_in_any_crowd(on_gpu: Loaded) -> None:
    """Only the schedule differs, so the tokens are equal, greedy and seeded."""
    crowd = prompts(16)
    for sampling in ({}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
        serial, both = (
            texts(engine_of(on_gpu, overlap), crowd, 24, **sampling) for overlap in (False, True)
        )
        assert both == serial


def test_the_gpu_gives_the_cpus_tokens(on_gpu: Loaded, on_cpu: Loaded) -> None:
    crowd = prompts(8)
    assert texts(engine_of(on_gpu, True), crowd, 24) == texts(on_cpu.engine(), crowd, 24)


def test_streams_that_lag_behind_the_host_change_nothing(
    on_gpu: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B-35: a delay in front of every embedding makes any missing fence read stale memory, and a
    cancel in every tenth step gives blocks back while others run on."""
    runner, crowd = on_gpu.runner, prompts(12)
    right = texts(engine_of(on_gpu, overlap=False), crowd, 16)
    embed = runner.embed

    def late(inputs: Any) -> torch.Tensor:
        torch.cuda._sleep(200_000)
        return embed(inputs)

    monkeypatch.setattr(runner, "embed", late)
    engine = engine_of(on_gpu, overlap=True)
    driver = Driver(engine)
    for rid, prompt in enumerate(crowd):
        driver.submit(rid, prompt, 16, ignore_eos=True)
        driver.submit(100 + rid, prompt[::-1], 64, ignore_eos=True)
    driver.run(
        lambda step: engine.cancel(CLIENT, Cancel(100 + step // 10)) if step % 10 == 0 else None
    )
    driver.assert_all_free()
    assert [driver.tokens(rid) for rid in range(len(crowd))] == right
    assert counters(engine)["prefill_decode_stream_overlap_steps"] > 0
