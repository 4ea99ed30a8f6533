"""The five ways to share the card on a GPU: the serial twin's tokens, right counters, refusals.

decisions.md sections 1 and 3. The tiny model's best two logits lie far apart, so even the mixed
forward, which multiplies in other kernels, gives the same tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.schema import FaultRule
from engine_actor import ops
from engine_actor.core.plan import OverlapMode
from engine_actor.engine import Engine
from engine_actor.loop import Heartbeat
from engine_actor.status import engine_status
from tests.engine.real_engine import Loaded, texts
from tests.engine_gpu.crowd import CHUNK, prompts, short_stream_and_long_prompt
from tests.engine_gpu.late_streams import delay, shows

pytestmark = pytest.mark.gpu

BEAT = Heartbeat(alive=True, busy_seconds=0.0, steps=3, fatal=None)
STREAMS = (OverlapMode.TWO_STREAMS, OverlapMode.TWO_STREAMS_CAPPED, OverlapMode.GREEN)
COUNTERS = (
    "prefill_steps_total",
    "prefill_decode_overlap_steps",
    "prefill_decode_stream_overlap_steps",
    "prefill_decode_mixed_forward_steps",
)


def engine_of(loaded: Loaded, mode: OverlapMode, **config: Any) -> Engine:
    settings: dict[str, Any] = {"prefill_chunk_tokens": CHUNK, "overlap_mode": mode.value}
    return loaded.engine(**(settings | config))


@pytest.mark.parametrize("mode", OverlapMode)
def test_each_mode_counts_as_what_it_is(on_gpu: Loaded, mode: OverlapMode) -> None:
    engine = engine_of(on_gpu, mode)
    driver = short_stream_and_long_prompt(engine, max_tokens=60)
    seen = [engine.metrics.value(name) for name in COUNTERS]
    both = 11
    streams = both if mode in STREAMS else 0
    mixed = both if mode is OverlapMode.MIXED else 0
    assert seen == [12, both, streams, mixed]
    assert engine.metrics.value("prefill_decode_overlap_mode_steps", mode.value) == both
    status = engine_status(engine, 1, BEAT, 0)
    assert status["overlap_mode_effective"] == mode.value
    assert status["prefill_decode_overlap_reason"] is None
    priorities = {"decode": -1, "prefill": 0} if mode in STREAMS else None
    assert status["overlap_stream_priorities"] == priorities
    twin = short_stream_and_long_prompt(engine_of(on_gpu, OverlapMode.SERIAL), max_tokens=60)
    assert [driver.tokens(rid) for rid in (0, 1)] == [twin.tokens(rid) for rid in (0, 1)]


@pytest.mark.parametrize("mode", OverlapMode)
def test_works_overlap_in_time_where_they_have_two_streams(
    on_gpu: Loaded, mode: OverlapMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes so long that a prefill is launched beside them however busy the host is."""
    decode = on_gpu.runner.decode_logits

    def long_decode(inputs: Any) -> torch.Tensor:
        delay()
        return decode(inputs)

    def overlap() -> bool:
        engine = engine_of(on_gpu, mode)
        short_stream_and_long_prompt(engine, max_tokens=60)
        return engine.metrics.value("prefill_decode_overlapped_seconds") > 0

    monkeypatch.setattr(on_gpu.runner, "decode_logits", long_decode)
    assert shows(overlap, monkeypatch) if mode in STREAMS else not overlap()


@pytest.mark.parametrize("mode", [mode for mode in OverlapMode if mode is not OverlapMode.SERIAL])
@pytest.mark.parametrize("chunk", [CHUNK, 100])
def test_the_serial_twins_tokens_in_any_crowd(
    on_gpu: Loaded, mode: OverlapMode, chunk: int
) -> None:
    crowd = prompts(16)
    for sampling in ({}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
        serial, shared = (
            texts(engine_of(on_gpu, each, prefill_chunk_tokens=chunk), crowd, 24, **sampling)
            for each in (OverlapMode.SERIAL, mode)
        )
        assert shared == serial


@pytest.mark.parametrize("mode", STREAMS)
@pytest.mark.parametrize("model", ["on_kernels", "on_graphs"])
def test_the_kernels_of_a_layer_give_the_serial_twins_tokens(
    model: str, mode: OverlapMode, request: pytest.FixtureRequest
) -> None:
    """Heads of 64 in half precision: the same kernels in the same shapes, so the same bits."""
    loaded, crowd = request.getfixturevalue(model), prompts(16)
    for sampling in ({}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
        engine = engine_of(loaded, mode)
        shared = texts(engine, crowd, 24, **sampling)
        assert shared == texts(engine_of(loaded, OverlapMode.SERIAL), crowd, 24, **sampling)
        assert engine.metrics.value("prefill_decode_stream_overlap_steps") > 3
    assert (loaded.runner.graph_counts.replays > 0) == (model == "on_graphs")


@pytest.mark.parametrize("mode", OverlapMode)
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("burst", [None, 60])
def test_ranges_of_layers_give_the_tokens_of_whole_chunks(
    on_gpu: Loaded, mode: OverlapMode, ahead: bool, burst: int | None
) -> None:
    """Half of the tiny model's layers a step, beside streams, in whichever way they share; and
    whole chunks of a crowd, behind which nothing is planned before they have ended."""
    crowd = prompts(16)
    whole = texts(engine_of(on_gpu, OverlapMode.SERIAL, prefill_chunk_tokens=64), crowd, 24)
    cut = {"prefill_slice_tokens": 20, "prefill_burst_tokens": burst}
    settings = {"prefill_chunk_tokens": 64, "async_steps": ahead} | cut
    assert texts(engine_of(on_gpu, mode, **settings), crowd, 24) == whole


@pytest.mark.parametrize("mode", OverlapMode)
def test_the_synchronising_twin_gives_the_same_tokens(on_gpu: Loaded, mode: OverlapMode) -> None:
    crowd = prompts(8)
    ahead, twin = (
        texts(engine_of(on_gpu, mode, async_steps=switch), crowd, 16) for switch in (True, False)
    )
    assert ahead == twin


@pytest.mark.parametrize("mode", OverlapMode)
@pytest.mark.parametrize("stage", ["prepare", "launch", "finish"])
def test_a_passing_fault_changes_no_token(on_gpu: Loaded, mode: OverlapMode, stage: str) -> None:
    """S-42: in whichever way the works were launched, they are tried again apart."""
    crowd = prompts(8)
    right = texts(engine_of(on_gpu, OverlapMode.SERIAL), crowd, 12)
    fault = FaultRule(stage=stage, min_rows=CHUNK, times=2)  # type: ignore[arg-type]
    engine = engine_of(on_gpu, mode, faults=(fault,))
    assert texts(engine, crowd, 12) == right
    assert engine.metrics.value("oom_retries_total") > 0


def test_green_partitions_are_what_status_says(on_gpu: Loaded) -> None:
    engine = engine_of(on_gpu, OverlapMode.GREEN, overlap_max_ctas=100)
    assert engine.pair.max_ctas is not None
    assert 84 <= engine.pair.max_ctas <= 100
    assert engine_status(engine, 1, BEAT, 0)["overlap_max_ctas"] == engine.pair.max_ctas


def test_refused_green_contexts_are_two_streams_with_the_reason(
    on_gpu: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More multiprocessors for the prefill than the card has: the real call's own refusal."""
    engine = engine_of(on_gpu, OverlapMode.GREEN, overlap_max_ctas=100_000)
    status = engine_status(engine, 1, BEAT, 0)
    assert status["overlap_mode"] == "green"
    assert status["overlap_mode_effective"] == "two_streams"
    assert "nothing to split" in status["prefill_decode_overlap_reason"]

    def old_driver(*arguments: object) -> None:
        raise ops.GreenContextRefused("the driver is older than CUDA 12.4: no cuGreenCtxCreate")

    monkeypatch.setattr(ops, "split_card", old_driver)
    engine = engine_of(on_gpu, OverlapMode.GREEN)
    driver = short_stream_and_long_prompt(engine, max_tokens=60)
    assert engine.metrics.value("prefill_decode_stream_overlap_steps") == 11
    assert len(driver.tokens(1)) == 8
    assert (
        "older than CUDA 12.4" in engine_status(engine, 1, BEAT, 0)["prefill_decode_overlap_reason"]
    )
