"""How the works of one step are run: two halves, the same verbs for every way to share the device;
and the plainest way, one work after the other. `streams.py` has two streams with fences both ways.

A step has two halves. launch() puts both works and then their sampling on the device, joined there,
and waits for nothing; finish() lets the host wait for that step and report. Between the two the
next step may be launched: its works wait on the device for the stream that samples.
Knows the order and the fences; knows no request and no fault: `attempt` (isolate.py) runs a verb
and says whether it passed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from engine_actor.core.overlap_policy import Sharing
from engine_actor.core.plan import OverlapMode
from engine_actor.work.base import Lane, Work, WorkState
from engine_actor.work.timing import ClockTimer, EventTimer, Timer

Attempt = Callable[[Work, Callable[[], object]], bool]
"""Run one verb of a work; False where it failed (the work is then FAILED)."""


class Fence(Protocol):
    """A point in a stream of the device."""

    def synchronize(self) -> None:
        """Let the host wait until the device has come to it."""
        ...

    def query(self) -> bool: ...


class NoFence:
    """On a CPU everything has run when its call returns."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Launched:
    """The works of a step between its two halves, in the order of finish(); failed ones as well.
    `done`: behind the last thing that the step put on the device. `overlapped`: both works were
    really launched on two streams.
    """

    works: tuple[Work, ...]
    done: Fence
    overlapped: bool = False


class Pair(Protocol):
    """Runs the works of one step in two halves; finish() in the order of launch().

    mode, max_ctas: how a step with both works is shared where nobody says otherwise. reason: why
    that is not the mode that was asked for, None where it is.
    """

    mode: OverlapMode
    max_ctas: int | None
    reason: str | None

    def launch(
        self,
        decode: Work | None,
        prefill: Work | None,
        attempt: Attempt,
        sharing: Sharing | None = None,
    ) -> Launched:
        """Prepare, launch, join on the device, sample there. The host waits for nothing. `sharing`:
        what the plan says; a pair that knows only one mode takes no more than max_ctas from it.
        """
        ...

    def finish(self, launched: Launched, attempt: Attempt) -> None:
        """Wait for the step, then finish the works that were sampled."""
        ...


def finish_in_order(launched: Launched, attempt: Attempt) -> None:
    """The second half of every pair: nothing is reported before the device has done the step."""
    launched.done.synchronize()
    for work in launched.works:
        if work.state is WorkState.SAMPLED:
            attempt(work, work.finish)


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
    max_ctas: int | None = None
    reason: str | None = None

    def __init__(self, device: torch.device) -> None:
        self.lane: Lane = CallerLane(device)
        self._device = device

    def launch(
        self,
        decode: Work | None,
        prefill: Work | None,
        attempt: Attempt,
        sharing: Sharing | None = None,
    ) -> Launched:
        works = tuple(work for work in (decode, prefill) if work is not None)
        # The device computes the first while the host still prepares the second.
        running = [
            work
            for work in works
            if attempt(work, work.prepare) and attempt(work, partial(work.launch, self.lane))
        ]
        # One stream: what it samples comes after what it computes, without a fence.
        for work in running:
            attempt(work, work.sample)
        return Launched(works, self.fence())

    def finish(self, launched: Launched, attempt: Attempt) -> None:
        finish_in_order(launched, attempt)

    def fence(self) -> Fence:
        """This point of the current stream."""
        if self._device.type != "cuda":
            return NoFence()
        return torch.cuda.current_stream(self._device).record_event()
