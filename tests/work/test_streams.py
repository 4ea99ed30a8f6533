"""Order and fences of the two pairs. The device's streams are recorded, not run."""

from __future__ import annotations

import pytest
import torch

from engine_actor.core.plan import OverlapMode
from engine_actor.work.pair import SerialPair
from engine_actor.work.sharing import share_device
from engine_actor.work.streams import StreamPair
from engine_actor.work.timing import ClockTimer, EventTimer, intersection
from tests.work.recorded import VERBS, RecordedStreams, attempt, run, works

CPU = torch.device("cpu")


def stream_pair(log: list[str]) -> StreamPair[str]:
    return StreamPair(RecordedStreams(log), "fast", "slow", SerialPair(CPU))


def test_serial_is_decode_then_prefill_in_the_same_three_verbs() -> None:
    """S-57, S-68."""
    log: list[str] = []
    assert run(SerialPair(CPU), *works(log)) is False
    assert log == [
        "decode.prepare",
        "decode.launch",
        "prefill.prepare",
        "prefill.launch",
        "decode.sample",
        "prefill.sample",
        "decode.finish",
        "prefill.finish",
    ]


def test_two_streams_launch_decode_first_and_finish_prefill_first() -> None:
    """S-52, S-53: both fences, each before what it protects; S-54: sampling after the join, the
    host's wait after all that the device is given."""
    log: list[str] = []
    assert run(stream_pair(log), *works(log)) is True
    assert log == [
        "decode.prepare",
        "prefill.prepare",
        "fast waits for default",
        "enter fast",
        "decode.launch",
        "leave fast",
        "slow waits for default",
        "enter slow",
        "prefill.launch",
        "leave slow",
        "default waits for slow",
        "default waits for fast",
        "prefill.sample",
        "decode.sample",
        "record default",
        "host waits for default",
        "prefill.finish",
        "decode.finish",
    ]


@pytest.mark.parametrize("alone", ["decode", "prefill"])
def test_one_work_needs_no_second_stream(alone: str) -> None:
    """S-59: such a step is no overlap, whatever the mode."""
    log: list[str] = []
    decode, prefill = works(log)
    pair = (decode, None) if alone == "decode" else (None, prefill)
    assert run(stream_pair(log), *pair) is False
    assert log == [f"{alone}.{verb}" for verb in VERBS]


def test_the_next_step_is_launched_behind_the_join_of_an_open_one() -> None:
    """Each work of the next step waits for the stream that samples, which waited for both works of
    this one; the host waits for the steps in their order."""
    log: list[str] = []
    pair = stream_pair(log)
    first, second = (pair.launch(*works(log), attempt) for _ in range(2))
    pair.finish(first, attempt)
    pair.finish(second, attempt)
    fences = [entry for entry in log if "wait" in entry or entry.startswith("record")]
    launch = [
        "fast waits for default",
        "slow waits for default",
        "default waits for slow",
        "default waits for fast",
        "record default",
    ]
    assert fences == [*launch, *launch, *["host waits for default"] * 2]
    sampled = [index for index, entry in enumerate(log) if entry == "decode.sample"]
    assert sampled[0] < log.index("fast waits for default", sampled[0]) < sampled[1]


@pytest.mark.parametrize("pair", [SerialPair(CPU), "streams"])
@pytest.mark.parametrize("broken", VERBS)
@pytest.mark.parametrize("which", ["decode", "prefill"])
def test_a_broken_verb_stops_its_work_only(pair: object, broken: str, which: str) -> None:
    log: list[str] = []
    chosen = stream_pair(log) if pair == "streams" else pair
    overlapped = run(chosen, *works(log, **{which: broken}))  # type: ignore[arg-type]
    other = "prefill" if which == "decode" else "decode"
    assert [entry for entry in log if entry.startswith(other)] == [f"{other}.{v}" for v in VERBS]
    done = VERBS[: VERBS.index(broken) + 1]
    assert [entry for entry in log if entry.startswith(which)] == [f"{which}.{v}" for v in done]
    assert overlapped is (pair == "streams" and broken in ("sample", "finish"))


def test_a_launch_that_fails_half_way_is_still_joined() -> None:
    """Its kernels may still be writing KV: nobody may reuse a block before the fence."""
    log: list[str] = []
    run(stream_pair(log), *works(log, prefill="launch"))
    join = ["default waits for slow", "default waits for fast"]
    behind = ["decode.sample", "record default", "host waits for default", "decode.finish"]
    assert log[-6:] == [*join, *behind]


def test_the_cpu_is_serial_whatever_the_switch() -> None:
    for wanted in (OverlapMode.SERIAL, OverlapMode.TWO_STREAMS):
        assert share_device(CPU, wanted).mode is OverlapMode.SERIAL


def test_the_switch_off_is_serial_on_a_device_too() -> None:
    """S-57: enable_prefill_decode_overlap: false."""
    assert share_device(torch.device("cuda"), OverlapMode.SERIAL).mode is OverlapMode.SERIAL


def test_a_clock_timer_that_never_ran_has_no_time() -> None:
    timer = ClockTimer()
    assert timer.elapsed() is None
    timer.start()
    assert timer.elapsed() is None
    timer.stop()
    elapsed = timer.elapsed()
    assert elapsed is not None
    assert elapsed >= 0.0


class FakeEvent:
    """An event at a known millisecond."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def event_timer(start: float, stop: float) -> EventTimer:
    timer = EventTimer()
    timer.started, timer.stopped = FakeEvent(start), FakeEvent(stop)  # type: ignore[assignment]
    return timer


@pytest.mark.parametrize(
    ("first", "second", "milliseconds"),
    [
        ((0, 10), (4, 6), 2.0),
        ((0, 10), (4, 20), 6.0),
        ((5, 10), (0, 7), 2.0),
        ((0, 5), (5, 9), 0.0),
        ((0, 5), (8, 9), 0.0),
        ((8, 9), (0, 5), 0.0),
    ],
)
def test_overlapped_time_is_where_both_intervals_run(
    first: tuple[float, float], second: tuple[float, float], milliseconds: float
) -> None:
    """S-55: own events per work; the same wall time is never counted twice."""
    timers = event_timer(*first), event_timer(*second)
    assert intersection(*timers) == pytest.approx(milliseconds / 1e3)
    assert timers[0].elapsed() == pytest.approx((first[1] - first[0]) / 1e3)


def test_clock_timers_never_overlap() -> None:
    assert intersection(ClockTimer(), event_timer(0, 1)) == 0.0
    assert intersection(None, None) == 0.0
    assert intersection(EventTimer(), EventTimer()) == 0.0
