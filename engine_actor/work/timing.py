"""How long a work ran: device events where it ran on a stream, the monotonic clock elsewhere.

A timer is made inside a work's launch and nowhere else, so "created but never recorded" cannot be
written; a work that never launched has no timer at all. Knows nothing of works.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Timer(Protocol):
    """start() and stop() around a launch; the rest only after the join."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def elapsed(self) -> float | None:
        """Seconds between start and stop; None where either is missing."""
        ...


class ClockTimer:
    """For works that run where they are called: the CPU."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._stopped: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._stopped = time.perf_counter()

    def elapsed(self) -> float | None:
        if self._started is None or self._stopped is None:
            return None
        return self._stopped - self._started


class EventTimer:
    """For works on a CUDA stream: only that stream's own time is counted."""

    def __init__(self) -> None:
        self.started: torch.cuda.Event | None = None
        self.stopped: torch.cuda.Event | None = None

    def start(self) -> None:
        self.started = torch.cuda.Event(enable_timing=True)
        self.started.record()

    def stop(self) -> None:
        self.stopped = torch.cuda.Event(enable_timing=True)
        self.stopped.record()

    def elapsed(self) -> float | None:
        if self.started is None or self.stopped is None:
            return None
        return self.started.elapsed_time(self.stopped) / 1e3


def intersection(first: Timer | None, second: Timer | None) -> float:
    """Seconds in which both event intervals run; 0.0 where either was not timed by events.

    elapsed_time() is signed: the second work may well have started before the first.
    """
    if not isinstance(first, EventTimer) or not isinstance(second, EventTimer):
        return 0.0
    if not (first.started and first.stopped and second.started and second.stopped):
        return 0.0
    end = first.started.elapsed_time(first.stopped)
    other = first.started.elapsed_time(second.started)
    other_end = first.started.elapsed_time(second.stopped)
    return max(0.0, min(end, other_end) - max(0.0, other)) / 1e3
