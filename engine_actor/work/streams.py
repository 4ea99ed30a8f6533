"""The decode and the prefill work of one step on two streams of the device, with fences both ways;
the prefill may have only some of the multiprocessors. `pair.py` says what the halves of a step are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from engine_actor import ops
from engine_actor.core.overlap_policy import Sharing
from engine_actor.core.plan import OverlapMode
from engine_actor.work.base import Lane, Work
from engine_actor.work.pair import Attempt, Fence, Launched, SerialPair, finish_in_order
from engine_actor.work.timing import EventTimer, Timer

S = TypeVar("S")

DECODE_PRIORITY, PREFILL_PRIORITY = -1, 0
"""Of the two streams; the lower number goes first where both have blocks to start."""


class StreamApi(Protocol[S]):
    """The few verbs of a device's streams that the pair needs; tests record them."""

    def current(self) -> S: ...

    def wait(self, waiter: S, awaited: S) -> None: ...

    def record(self, stream: S) -> Fence: ...

    def entered(self, stream: S) -> AbstractContextManager[object]: ...

    def limited(self, max_ctas: int) -> AbstractContextManager[object]:
        """Inside, what is launched leaves all but so many multiprocessors free, where it can."""
        ...

    def new_timer(self) -> Timer: ...


class CudaStreams:
    """StreamApi of torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self, high_priority: bool) -> torch.cuda.Stream:
        """A stream of its own; decode gets the high priority."""
        priority = DECODE_PRIORITY if high_priority else PREFILL_PRIORITY
        return torch.cuda.Stream(self._device, priority=priority)

    def foreign_stream(self, handle: int) -> torch.cuda.ExternalStream:
        """A stream that the driver made, by its handle."""
        return torch.cuda.ExternalStream(handle, self._device)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def wait(self, waiter: torch.cuda.Stream, awaited: torch.cuda.Stream) -> None:
        waiter.wait_stream(awaited)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        return stream.record_event()

    def entered(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def limited(self, max_ctas: int) -> AbstractContextManager[object]:
        return ops.limit_multiprocessors(max_ctas)

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


class LimitedLane(Generic[S]):
    """A lane whose products of many rows leave multiprocessors free. The limit is read by the host
    as it launches, so nothing that another lane launches is held back by it.
    """

    def __init__(self, lane: StreamLane[S], api: StreamApi[S], max_ctas: int) -> None:
        self._lane = lane
        self._api = api
        self._max_ctas = max_ctas

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._lane.entered(), self._api.limited(self._max_ctas):
            yield

    def new_timer(self) -> Timer:
        return self._lane.new_timer()


class StreamPair(Generic[S]):
    """Decode and prefill of one step on two streams. A step with one work runs on the caller's."""

    reason: str | None = None

    def __init__(
        self,
        api: StreamApi[S],
        decode_stream: S,
        prefill_stream: S,
        serial: SerialPair,
        mode: OverlapMode = OverlapMode.TWO_STREAMS,
        max_ctas: int | None = None,
    ) -> None:
        self.mode = mode
        self.max_ctas = max_ctas
        self._api = api
        self._decode = StreamLane(api, decode_stream)
        self._prefill = StreamLane(api, prefill_stream)
        self._serial = serial

    def launch(
        self,
        decode: Work | None,
        prefill: Work | None,
        attempt: Attempt,
        sharing: Sharing | None = None,
    ) -> Launched:
        if decode is None or prefill is None:
            return self._serial.launch(decode, prefill, attempt)
        max_ctas = self.max_ctas if sharing is None else sharing.max_ctas
        lane: Lane = self._prefill
        if max_ctas is not None:
            lane = LimitedLane(self._prefill, self._api, max_ctas)
        ready = [attempt(decode, decode.prepare), attempt(prefill, prefill.prepare)]
        launched = [
            ready[0] and attempt(decode, partial(decode.launch, self._decode)),
            ready[1] and attempt(prefill, partial(prefill.launch, lane)),
        ]
        current = self._api.current()
        self.join(current)
        if launched[1]:
            attempt(prefill, prefill.sample)
        if launched[0]:
            attempt(decode, decode.sample)
        return Launched((prefill, decode), self._api.record(current), all(launched))

    def finish(self, launched: Launched, attempt: Attempt) -> None:
        finish_in_order(launched, attempt)

    def join(self, current: S) -> None:
        """The stream that samples waits for both, and so does all that follows on it. Both fences
        hold even when a launch failed half way: its kernels may still be writing."""
        self._api.wait(current, self._prefill.stream)
        self._api.wait(current, self._decode.stream)
