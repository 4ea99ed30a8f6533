"""How the decode and the prefill work of one step share the device: one after the other, or on two
streams with fences both ways. The same three verbs in either case.

Knows the order and the fences; knows no request and no fault: `attempt` (isolate.py) runs a verb
and says whether it passed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from engine_actor.core.plan import OverlapMode
from engine_actor.work.base import Lane, Work
from engine_actor.work.timing import ClockTimer, EventTimer, Timer

S = TypeVar("S")

Attempt = Callable[[Work, Callable[[], object]], bool]
"""Run one verb of a work; False where it failed (the work is then FAILED)."""


class Pair(Protocol):
    """Runs the works of one step. Returns True where both really ran on two streams."""

    mode: OverlapMode

    def run(self, decode: Work | None, prefill: Work | None, attempt: Attempt) -> bool: ...


class CallerLane:
    """The caller's own stream, or the CPU itself."""

    def __init__(self, device: torch.device) -> None:
        self._timer: type[ClockTimer] | type[EventTimer] = (
            EventTimer if device.type == "cuda" else ClockTimer
        )

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def new_timer(self) -> Timer:
        return self._timer()


class SerialPair:
    """Decode, then prefill: the CPU, and the device with the overlap switched off."""

    mode = OverlapMode.SERIAL

    def __init__(self, device: torch.device) -> None:
        self.lane: Lane = CallerLane(device)
        self._device = device

    def run(self, decode: Work | None, prefill: Work | None, attempt: Attempt) -> bool:
        works = [work for work in (decode, prefill) if work is not None]
        works = [work for work in works if attempt(work, work.prepare)]
        works = [work for work in works if attempt(work, partial(work.launch, self.lane))]
        self.join()
        for work in works:
            attempt(work, work.finish)
        return False

    def join(self) -> None:
        """Wait for the device: nothing may be sampled before."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class StreamApi(Protocol[S]):
    """The few verbs of a device's streams that the pair needs; tests record them."""

    def current(self) -> S: ...

    def wait(self, waiter: S, awaited: S) -> None: ...

    def synchronize(self, stream: S) -> None: ...

    def entered(self, stream: S) -> AbstractContextManager[object]: ...

    def new_timer(self) -> Timer: ...


class CudaStreams:
    """StreamApi of torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self, high_priority: bool) -> torch.cuda.Stream:
        """A stream of its own; decode gets the high priority, so that a prompt cannot stall it."""
        return torch.cuda.Stream(self._device, priority=-1 if high_priority else 0)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def wait(self, waiter: torch.cuda.Stream, awaited: torch.cuda.Stream) -> None:
        waiter.wait_stream(awaited)

    def synchronize(self, stream: torch.cuda.Stream) -> None:
        stream.synchronize()

    def entered(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def new_timer(self) -> Timer:
        return EventTimer()


class StreamLane(Generic[S]):
    """One stream of the pair. It waits for the default stream before anything runs on it."""

    def __init__(self, api: StreamApi[S], stream: S) -> None:
        self._api = api
        self.stream = stream

    def entered(self) -> AbstractContextManager[object]:
        # Without this fence a kernel may read a block table that the default stream still copies,
        # or write KV that it still zeroes.
        self._api.wait(self.stream, self._api.current())
        return self._api.entered(self.stream)

    def new_timer(self) -> Timer:
        return self._api.new_timer()


class StreamPair(Generic[S]):
    """Decode and prefill of one step on two streams. A step with one work runs on the caller's."""

    mode = OverlapMode.TWO_STREAMS

    def __init__(
        self, api: StreamApi[S], decode_stream: S, prefill_stream: S, serial: SerialPair
    ) -> None:
        self._api = api
        self._decode = StreamLane(api, decode_stream)
        self._prefill = StreamLane(api, prefill_stream)
        self._serial = serial

    def run(self, decode: Work | None, prefill: Work | None, attempt: Attempt) -> bool:
        if decode is None or prefill is None:
            return self._serial.run(decode, prefill, attempt)
        ready = [attempt(decode, decode.prepare), attempt(prefill, prefill.prepare)]
        launched = [
            ready[0] and attempt(decode, partial(decode.launch, self._decode)),
            ready[1] and attempt(prefill, partial(prefill.launch, self._prefill)),
        ]
        self.join()
        if launched[1]:
            attempt(prefill, prefill.finish)
        if launched[0]:
            attempt(decode, decode.finish)
        return all(launched)

    def join(self) -> None:
        """The default stream waits for both, then the host for it. Both fences hold even when a
        launch failed half way: its kernels may still be writing."""
        current = self._api.current()
        self._api.wait(current, self._prefill.stream)
        self._api.wait(current, self._decode.stream)
        self._api.synchronize(current)


def make_pair(device: torch.device, overlap: bool) -> SerialPair | StreamPair[torch.cuda.Stream]:
    """The pair for this device: two streams on CUDA with the switch on, else serial."""
    serial = SerialPair(device)
    if device.type != "cuda" or not overlap:
        return serial
    api = CudaStreams(device)
    return StreamPair(api, api.new_stream(True), api.new_stream(False), serial)
