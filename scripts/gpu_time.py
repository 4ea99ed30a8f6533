"""Where a step's time goes on a GPU: how long the device is busy, how long the host waits for it.

Busy time is the union of the intervals of all kernels and copies as the driver's tracer gives them,
from steps of their own: tracing slows launches, hardly the kernels. On a CPU there is nothing to
trace and nobody waits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

WAITS = (
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda, "synchronize"),
)
READS = ("cpu", "tolist", "item")
"""Of a tensor on the device: they wait for it."""
SHOWN_KERNELS = 14


@dataclass(frozen=True)
class DeviceTime:
    """Per step: seconds in which the device ran anything, kernels and copies launched, and the
    seconds of each name, longest first."""

    busy: float
    launches: float
    names: tuple[tuple[str, float, float], ...] = ()
    """(name, seconds a step, launches a step)"""

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{1e6 * seconds:8.1f} us {count:6.1f} x {name[:76]}"
            for name, seconds, count in self.names[:SHOWN_KERNELS]
        ]


def union_seconds(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def trace(run: Callable[[], object], steps: int) -> DeviceTime | None:
    """Trace run(), which makes `steps` steps. None where no device event was seen."""
    if not torch.cuda.is_available():
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return summarise(found, steps) if found else None


def summarise(events: Sequence[tuple[str, float, float]], steps: int) -> DeviceTime:
    """(name, start us, end us) of all device events of `steps` steps."""
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, start, end in events:
        seconds[name] += (end - start) / 1e6 / steps  # type: ignore[assignment]
        counts[name] += 1
    busy = union_seconds([(start, end) for _, start, end in events]) / 1e6 / steps
    names = tuple((n, float(s), counts[n] / steps) for n, s in seconds.most_common())
    return DeviceTime(busy, len(events) / steps, names)


class WaitMeter:
    """Seconds that this thread spent waiting for the device."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`wait` with its time counted; what it calls itself is not counted twice."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return wait(*args, **kwargs)
            self._inside = True
            started = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self._inside = False

        return run

    def timed_read(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a method of tensors, counted where the tensor is on the device."""
        counted = self.timed(read)

        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return (counted if tensor.is_cuda else read)(tensor, *args, **kwargs)

        return run


@contextmanager
def metered_waits() -> Iterator[WaitMeter]:
    """While it is open, every wait of torch for the device is counted."""
    meter = WaitMeter()
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name in WAITS:
            before.append((owner, name, owner.__dict__.get(name)))
            setattr(owner, name, meter.timed(getattr(owner, name)))
        for name in READS:
            before.append((torch.Tensor, name, torch.Tensor.__dict__.get(name)))
            setattr(torch.Tensor, name, meter.timed_read(getattr(torch.Tensor, name)))
        yield meter
    finally:
        for owner, name, own in reversed(before):
            if own is not None:
                setattr(owner, name, own)
            else:
                with suppress(AttributeError):
                    delattr(owner, name)
