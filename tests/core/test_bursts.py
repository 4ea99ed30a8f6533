"""A crowd of prompts beside streams: whole chunks of those that end, and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.core.budget import CROWD, is_crowd
from engine_actor.core.overlap_policy import FixedPolicy, Sharing
from engine_actor.core.plan import OverlapMode
from tests.doubles.scheduler_harness import SchedulerHarness

SLICE, BURST = 16, 64


def streams(n: int, **knobs: object) -> SchedulerHarness:
    """n sequences that decode, and no prompt."""
    given: dict[str, object] = {"slice_tokens": SLICE, "burst_tokens": BURST, "n_layers": 8}
    given |= {"chunk": 256, "prefix_cache": False, "n_blocks": 400, "max_num_seqs": 64}
    harness = SchedulerHarness(**(given | knobs))  # type: ignore[arg-type]
    for rid in range(n):
        harness.add(rid, [rid % 7 + 2] * 5, max_tokens=200)
    while any(s.n_output == 0 for s in (*harness.scheduler.waiting, *harness.scheduler.running)):
        harness.step()
    harness.plans.clear()
    return harness


def crowd(harness: SchedulerHarness, n: int, tokens: int, max_tokens: int = 2) -> None:
    for rid in range(1000, 1000 + n):
        harness.add(rid, [2 + (rid + i) % 90 for i in range(tokens)], max_tokens=max_tokens)


def taken(harness: SchedulerHarness) -> list[list[int]]:
    """Tokens of every step's whole chunks; a range counts as none."""
    return [
        [chunk.end - chunk.start for chunk in plan.prefill if chunk.layers is None]
        for plan in harness.plans
    ]


@pytest.mark.parametrize(
    ("waiting", "decoding", "crowded"),
    [(1, 1, False), (2, 1, True), (2, 2, False), (3, 2, True), (3, 9, False), (4, 99, True)],
)
def test_a_crowd_outnumbers_the_streams_or_is_four(
    waiting: int, decoding: int, crowded: bool
) -> None:
    assert CROWD == 4
    assert is_crowd(waiting, decoding) is crowded


@pytest.mark.parametrize("depth", [0, 1])
def test_a_crowd_goes_in_whole_chunks_to_its_end(depth: int) -> None:
    harness = streams(8, depth=depth)
    crowd(harness, 10, 20)
    harness.run()
    assert [step for step in taken(harness) if step] == [*[[20] * 3] * 3, [20]]


def test_who_comes_after_a_crowd_goes_in_slices() -> None:
    harness = streams(8)
    crowd(harness, 4, 20)
    while any(harness.requests["c", rid].n_output == 0 for rid in range(1000, 1004)):
        harness.step()
    harness.add(2000, [5] * 40, max_tokens=2)
    harness.run()
    chunks = [chunk for plan in harness.plans for chunk in plan.prefill if chunk.key[1] == 2000]
    assert all(chunk.layers is not None for chunk in chunks)


@pytest.mark.parametrize("n", [1, 3])
def test_fewer_prompts_never_take_more_than_a_slice(n: int) -> None:
    harness = streams(8)
    crowd(harness, n, 40)
    harness.run()
    assert [step for step in taken(harness) if step] == []


def test_without_the_setting_a_crowd_waits_its_slices() -> None:
    harness = streams(8, burst_tokens=None)
    crowd(harness, 10, 40)
    harness.run()
    assert [step for step in taken(harness) if step] == []


def test_long_prompts_of_a_crowd_go_in_ranges_as_large_as_a_burst() -> None:
    harness = streams(8)
    crowd(harness, 4, 128)
    harness.step()
    (chunk,) = harness.plans[0].prefill
    assert chunk.layers is not None
    assert (chunk.layers.first, chunk.layers.last) == (0, 8 * BURST // 128)
    harness.run()


def test_in_a_mixed_forward_those_go_that_end_beside_its_decoded_rows() -> None:
    """Eight rows of the tile are the streams': four prompts of a quarter of a burst would all be
    cut two tokens short."""
    harness = streams(8)
    crowd(harness, 5, BURST // 4)
    plan = harness.scheduler.plan(FixedPolicy(Sharing(OverlapMode.MIXED)))
    assert (plan.mode, len(plan.decode)) == (OverlapMode.MIXED, 8)
    assert [chunk.end - chunk.start for chunk in plan.prefill] == [BURST // 4] * 3


def test_an_open_range_ends_before_the_crowd_and_no_prompt_passes_a_longer_one() -> None:
    harness = streams(8)
    crowd(harness, 1, 200)
    harness.step()
    for rid in range(2000, 2006):
        harness.add(rid, [rid % 90 + 2] * 20, max_tokens=2)
    harness.run()
    order = list(dict.fromkeys(chunk.key[1] for plan in harness.plans for chunk in plan.prefill))
    assert order == [1000, *range(2000, 2006)]


@given(
    decoding=st.integers(1, 6),
    prompts=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 150)), max_size=14),
    partial=st.integers(1, 6),
    depth=st.sampled_from([0, 1]),
)
@settings(max_examples=60, deadline=None)
def test_streams_go_on_in_every_step_and_a_step_has_a_bound(
    decoding: int, prompts: list[tuple[int, int]], partial: int, depth: int
) -> None:
    """Prompts that come at any step: no stream is left out of a step, none waits for more than a
    burst, every prompt ends (run() fails where one does not) with the text of its solo run."""
    harness = streams(decoding, max_partial_prefills=partial, depth=depth)
    for step in range(13):
        for rid, (at, tokens) in enumerate(prompts, 3000):
            if at == step:
                harness.add(rid, [2 + (rid * 7 + i) % 90 for i in range(tokens)], max_tokens=3)
        live = {s.key for s in harness.scheduler.running if s.n_output and s.key[1] < decoding}
        plan = harness.step()
        assert live <= {slot.key for slot in plan.decode}
    harness.run()
    for plan in harness.plans:
        layers = [chunk.layers for chunk in plan.prefill]
        if plan.decode and layers and layers[0] is None:
            assert sum(chunk.end - chunk.start for chunk in plan.prefill) <= BURST
        elif plan.decode and layers:
            assert layers[0] is not None
            part = (layers[0].last - layers[0].first) / layers[0].of
            tokens = plan.prefill[0].end - plan.prefill[0].start
            assert part * tokens <= max(BURST, tokens / layers[0].of)
