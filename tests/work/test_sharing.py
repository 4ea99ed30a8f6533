"""Which of the five ways a device has, and what each does with the works of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from engine_actor import ops
from engine_actor.core.overlap_policy import Sharing
from engine_actor.core.plan import OverlapMode
from engine_actor.work import sharing as sharing_module
from engine_actor.work.pair import Pair, SerialPair
from engine_actor.work.sharing import SharedDevice, share_device, three_quarters
from engine_actor.work.streams import StreamPair
from engine_actor.work.timing import ClockTimer, Timer
from tests.work.recorded import RecordedStreams, run, works

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICE = ops.DeviceInfo("cuda", "a card", sm=90, multiprocessors=132)


class FakeCuda(RecordedStreams):
    """CudaStreams without a card; streams are names."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([])

    def new_stream(self, high_priority: bool) -> str:
        return "high" if high_priority else "low"

    def foreign_stream(self, handle: int) -> str:
        return f"stream {handle}"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """share_device() finds a card of 132 multiprocessors that can be split."""
    monkeypatch.setattr(sharing_module, "CudaStreams", FakeCuda)
    monkeypatch.setattr(sharing_module, "SerialPair", lambda device: SerialPair(CPU))
    monkeypatch.setattr(ops, "device_info", lambda device: DEVICE)

    def split(index: int, first: int, priorities: tuple[int, int]) -> tuple[object, object]:
        from kernels.jit.green_contexts import Partition

        assert priorities == (-1, 0)
        decode = -(-first // 8) * 8
        return Partition(11, decode), Partition(12, 132 - decode)

    monkeypatch.setattr(ops, "split_card", split)


def steps(pair: SharedDevice, sharing: Sharing | None = None) -> list[str]:
    """What a step with both works comes to, without the host's two halves of each verb."""
    log: list[str] = []
    for each in pair._pairs.values():
        if isinstance(each, StreamPair):
            each._api._log = log
    run(pair, *works(log), sharing)
    return [entry for entry in log if entry.split(".")[-1] not in ("prepare", "sample", "finish")]


def streams_of(decode: str, prefill: str, *inner: str) -> list[str]:
    return [
        f"{decode} waits for default",
        f"enter {decode}",
        "decode.launch",
        f"leave {decode}",
        f"{prefill} waits for default",
        f"enter {prefill}",
        *inner,
        f"leave {prefill}",
        f"default waits for {prefill}",
        f"default waits for {decode}",
        "record default",
        "host waits for default",
    ]


@pytest.mark.parametrize("wanted", OverlapMode)
def test_a_cpu_has_no_streams_but_can_mix(wanted: OverlapMode) -> None:
    shared = share_device(CPU, wanted)
    can = wanted in (OverlapMode.SERIAL, OverlapMode.MIXED)
    assert shared.mode is (wanted if can else OverlapMode.SERIAL)
    assert shared.reason == (None if can else sharing_module.NO_STREAMS)
    assert set(shared.modes) == {OverlapMode.SERIAL, OverlapMode.MIXED}


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("wanted", OverlapMode)
def test_a_card_has_every_mode_that_is_asked_for(wanted: OverlapMode) -> None:
    shared = share_device(CUDA, wanted)
    assert (shared.mode, shared.reason) == (wanted, None)
    limited = wanted in (OverlapMode.TWO_STREAMS_CAPPED, OverlapMode.GREEN)
    assert shared.max_ctas == (100 if limited else None)


@pytest.mark.usefixtures("card")
def test_two_streams_know_no_limit_and_capped_ones_limit_the_prefill_alone() -> None:
    shared = share_device(CUDA, OverlapMode.TWO_STREAMS)
    assert steps(shared) == streams_of("high", "low", "prefill.launch")
    shared = share_device(CUDA, OverlapMode.TWO_STREAMS_CAPPED, 84)
    limited = ("limit 84", "prefill.launch", "no limit")
    assert steps(shared) == streams_of("high", "low", *limited)


@pytest.mark.usefixtures("card")
def test_green_runs_on_the_partitions_and_tells_the_prefill_how_large_its_own_is() -> None:
    shared = share_device(CUDA, OverlapMode.GREEN, 99)
    limited = ("limit 92", "prefill.launch", "no limit")
    assert steps(shared) == streams_of("stream 11", "stream 12", *limited)


@pytest.mark.usefixtures("card")
def test_the_plan_may_say_otherwise_step_by_step() -> None:
    """The seam of an adaptive policy."""
    shared = share_device(CUDA, OverlapMode.TWO_STREAMS)
    assert steps(shared, Sharing(OverlapMode.SERIAL)) == ["decode.launch", "prefill.launch"]
    capped = Sharing(OverlapMode.TWO_STREAMS_CAPPED, 64)
    limited = ("limit 64", "prefill.launch", "no limit")
    assert steps(shared, capped) == streams_of("high", "low", *limited)


@pytest.mark.usefixtures("card")
def test_refused_green_contexts_are_two_streams_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise ops.GreenContextRefused("the driver is older than CUDA 12.4: no cuGreenCtxCreate")

    monkeypatch.setattr(ops, "split_card", refuse)
    shared = share_device(CUDA, OverlapMode.GREEN)
    assert shared.mode is OverlapMode.TWO_STREAMS
    assert shared.reason is not None
    assert "older than CUDA 12.4" in shared.reason
    assert OverlapMode.GREEN not in shared.modes


@pytest.mark.parametrize(("count", "most"), [(132, 100), (20, 16), (16, 12), (108, 82)])
def test_a_quarter_of_the_card_is_left_to_the_decode(count: int, most: int) -> None:
    assert three_quarters(count) == most


def test_a_limit_holds_while_the_prefill_is_launched_and_no_longer() -> None:
    """The decode's own products, launched before and after, may take the whole card."""
    from kernels.linear.gemm_plan import share_of_card

    class Seen:
        """StreamApi of the process itself: the limit is the real one."""

        limited = staticmethod(ops.limit_multiprocessors)

        def current(self) -> str:
            return "default"

        def wait(self, waiter: str, awaited: str) -> None: ...

        def record(self, stream: str) -> Seen:
            return self

        def synchronize(self) -> None: ...

        def entered(self, stream: str) -> AbstractContextManager[object]:
            return nullcontext()

        def new_timer(self) -> Timer:
            seen.append(share_of_card(132))
            return ClockTimer()

    seen: list[int] = []
    pair: Pair = StreamPair(Seen(), "fast", "slow", SerialPair(CPU), max_ctas=84)
    run(pair, *works([]))
    assert [*seen, share_of_card(132)] == [132, 84, 132]
