"""A long chunk goes through the layers in ranges while streams decode: order, turns, what fails."""

from __future__ import annotations

import pytest

from engine_actor.core.budget import layers_of_slice
from engine_actor.core.plan import LayerRange, OverlapMode, PrefillChunk
from engine_actor.core.sequence import FinishReason
from tests.doubles.paged_model import Fault
from tests.doubles.scheduler_harness import SchedulerHarness


def decoding(n: int = 1, **knobs: object) -> SchedulerHarness:
    """n sequences that decode, and no prompt."""
    settings = {"chunk": 64, "slice_tokens": 16, "n_layers": 8, "prefix_cache": False}
    harness = SchedulerHarness(**(settings | knobs))  # type: ignore[arg-type]
    for rid in range(n):
        harness.add(rid, [rid % 7 + 2] * 5, max_tokens=60)
    while not harness.scheduler.running or any(s.n_output == 0 for s in harness.scheduler.running):
        harness.step()
    return harness


def parts(harness: SchedulerHarness) -> list[tuple[int, int, int, int]]:
    """(start, end, first layer, last layer) of every ranged chunk planned."""
    chunks = [chunk for plan in harness.plans for chunk in plan.prefill]
    return [(c.start, c.end, c.layers.first, c.layers.last) for c in chunks if c.layers is not None]


@pytest.mark.parametrize(
    ("slice_tokens", "chunk", "layers"),
    [(256, 2048, 4), (1, 2048, 1), (2048, 256, 36), (100, 512, 6), (256, 300, 18), (256, 8000, 1)],
)
def test_a_slice_takes_at_most_as_long_as_so_many_tokens(
    slice_tokens: int, chunk: int, layers: int
) -> None:
    assert layers_of_slice(slice_tokens, chunk, 36) == layers


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_chunk_takes_a_step_for_each_range(depth: int) -> None:
    harness = decoding(depth=depth)
    harness.add(100, list(range(2, 102)))
    harness.run()
    assert parts(harness) == [
        *((0, 64, first, first + 2) for first in range(0, 8, 2)),
        *((64, 100, first, min(8, first + 3)) for first in range(0, 8, 3)),
    ]


def test_a_step_with_a_range_decodes_too_and_shares_as_the_policy_says() -> None:
    harness = decoding()
    harness.add(100, list(range(2, 66)))
    before = len(harness.plans)
    harness.run()
    ranged = [plan for plan in harness.plans[before:] if plan.prefill]
    assert len(ranged) == 4
    assert all(len(plan.decode) == 1 for plan in ranged)
    assert [plan.prefill[0].samples for plan in ranged] == [False, False, False, True]
    assert {plan.mode for plan in ranged} == {OverlapMode.SERIAL}


def test_short_prompts_are_never_cut() -> None:
    harness = decoding()
    for rid in range(100, 103):
        harness.add(rid, [rid - 90] * 5)
    harness.run()
    assert parts(harness) == []
    together = [plan for plan in harness.plans if len(plan.prefill) == 3]
    assert len(together) == 1


def test_without_a_stream_whatever_is_left_runs_at_once() -> None:
    harness = decoding()
    harness.add(100, list(range(2, 66)))
    harness.step()
    harness.cancel(0)
    harness.step()
    assert parts(harness) == [(0, 64, 0, 2), (0, 64, 2, 8)]
    harness.run()


def test_two_long_prompts_take_turns_by_chunks() -> None:
    harness = decoding()
    harness.add(100, list(range(2, 130)))
    harness.add(101, list(range(3, 131)))
    harness.run()
    order = [
        chunk.key[1]
        for plan in harness.plans
        for chunk in plan.prefill
        if chunk.layers is not None and chunk.layers.first == 0
    ]
    assert order == [100, 101, 100, 101]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["retry", "silent"])
def test_a_range_that_fails_is_begun_again_with_whole_chunks(depth: int, kind: str) -> None:
    failed = []

    def fault(key: tuple[str, int], n_tokens: int) -> Fault | None:
        if key[1] == 100 and len(failed) == 0 and harness.requests[key].next_layer >= 4:
            failed.append(key)
            return Fault(kind)
        return None

    harness = decoding(depth=depth)
    harness.model.fault = fault
    harness.add(100, list(range(2, 66)))
    harness.run()
    whole = [c for p in harness.plans for c in p.prefill if c.key[1] == 100 and c.layers is None]
    assert failed
    assert [(chunk.start, chunk.end) for chunk in whole] == [
        (0, 16), (16, 32), (32, 48), (48, 64)
    ]  # fmt: skip
    assert harness.ended["c", 100] == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("end", ["cancel", "evict", "requeue"])
def test_an_open_chunk_may_end_or_start_again_at_any_time(depth: int, end: str) -> None:
    harness = decoding(depth=depth)
    harness.add(100, list(range(2, 66)))
    for _ in range(2):
        harness.step()
    if end == "cancel":
        harness.cancel(100)
    else:
        harness.evict(100, requeue=end == "requeue")
    harness.add(101, list(range(3, 67)))
    harness.run()
    firsts = [layers for _, _, *layers in parts(harness)]
    assert firsts.count([0, 2]) == (3 if end == "requeue" else 2)


def test_the_last_range_ends_a_chunk() -> None:
    chunk = PrefillChunk(("c", 1), 0, 4, (1, 2, 3, 4), (0,), False)
    assert chunk.ends
    assert not PrefillChunk(("c", 1), 0, 4, (1,), (0,), False, layers=LayerRange(0, 2, 8)).ends
    assert PrefillChunk(("c", 1), 0, 4, (1,), (0,), False, layers=LayerRange(6, 8, 8)).ends
