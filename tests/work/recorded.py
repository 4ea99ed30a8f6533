"""Works and streams that write down what is done with them, and run nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from engine_actor.core.overlap_policy import Sharing
from engine_actor.work.base import Lane, Work, WorkResult, WorkState
from engine_actor.work.pair import Pair
from engine_actor.work.timing import ClockTimer, Timer

CPU = torch.device("cpu")
VERBS = ("prepare", "launch", "sample", "finish")


class RecordedWork(Work):
    """Writes down its verbs; `broken` ones raise."""

    def __init__(self, name: str, log: list[str], broken: str = "") -> None:
        self.kind = name
        self._log = log
        self._broken = broken

    def prepare(self) -> None:
        self._do("prepare")

    def launch(self, lane: Lane) -> None:
        with lane.entered():
            lane.new_timer().start()
            self._do("launch")

    def sample(self) -> None:
        self._do("sample")
        self.state = WorkState.SAMPLED

    def finish(self) -> WorkResult:
        self._do("finish")
        return WorkResult()

    def _do(self, verb: str) -> None:
        self._log.append(f"{self.kind}.{verb}")
        if verb == self._broken:
            raise MemoryError(verb)

    keys = rows = sampled = blocks_needed = property(lambda self: 0)  # type: ignore[assignment]
    halves = without = _build = _forward = _report = _blocks_end = lambda self: None  # type: ignore


class RecordedFence:
    """The host's wait for a point in a stream."""

    def __init__(self, log: list[str], stream: str) -> None:
        self._log = log
        self._stream = stream

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self._stream}")

    def query(self) -> bool:
        return True


class RecordedStreams:
    """StreamApi whose streams are names."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def current(self) -> str:
        return "default"

    def wait(self, waiter: str, awaited: str) -> None:
        self._log.append(f"{waiter} waits for {awaited}")

    def record(self, stream: str) -> RecordedFence:
        self._log.append(f"record {stream}")
        return RecordedFence(self._log, stream)

    def entered(self, stream: str) -> AbstractContextManager[object]:
        @contextmanager
        def inside() -> Iterator[None]:
            self._log.append(f"enter {stream}")
            yield
            self._log.append(f"leave {stream}")

        return inside()

    def limited(self, max_ctas: int) -> AbstractContextManager[object]:
        @contextmanager
        def inside() -> Iterator[None]:
            self._log.append(f"limit {max_ctas}")
            yield
            self._log.append("no limit")

        return inside()

    def new_timer(self) -> Timer:
        return ClockTimer()


def attempt(work: Work, verb: Callable[[], object]) -> bool:
    try:
        verb()
    except MemoryError:
        return False
    return True


def works(log: list[str], decode: str = "", prefill: str = "") -> tuple[Work, Work]:
    return RecordedWork("decode", log, decode), RecordedWork("prefill", log, prefill)


def run(
    pair: Pair, decode: Work | None, prefill: Work | None, sharing: Sharing | None = None
) -> bool:
    """Both halves. True where the works ran on two streams."""
    launched = pair.launch(decode, prefill, attempt, sharing)
    pair.finish(launched, attempt)
    return launched.overlapped
