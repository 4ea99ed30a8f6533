"""Host memory that a device's copies read and write while the host goes on.

It is taken once, used again and again, and never given back to torch: torch records an event where
page-locked memory is freed that a copy has used, and on a device that is lost this fails inside a
destructor. C++ then ends the process before anybody could be told. Knows bytes and events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch

_LEAST_BYTES = 1 << 12


class Mark(Protocol):
    """A point in the device's current stream."""

    def record(self) -> object: ...

    def query(self) -> bool:
        """True once the device has come to it. Raises RuntimeError where it is lost."""
        ...


class Passed:
    """Of a CPU: everything has run when its call returns."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _Place:
    memory: torch.Tensor
    done: Mark


class Lease:
    """`memory`, u8 on the host, for as long as the lease is held. Nothing may keep a view of it for
    longer. note() stands behind each copy from or to it: until that is done nobody else has it.
    """

    def __init__(self, place: _Place, idle: deque[_Place], n_bytes: int) -> None:
        self.memory = place.memory[:n_bytes]
        self._place = place
        self._idle = idle

    def note(self) -> None:
        """Mark this point of the current stream."""
        self._place.done.record()

    def __del__(self) -> None:
        self._idle.append(self._place)


class PageLocked:
    """One device's. Any thread; `pin` is False and `new_mark` another in tests without a device."""

    def __init__(
        self, device: torch.device, new_mark: Callable[[], Mark] | None = None, pin: bool = True
    ) -> None:
        self._device = device
        self._new_mark = new_mark or (lambda: torch.Event(device=device))
        self._pin = pin
        self._idle: dict[int, deque[_Place]] = {}

    def lease(self, n_bytes: int) -> Lease:
        """At least so many bytes, whatever is in them."""
        size = max(_LEAST_BYTES, 1 << max(0, n_bytes - 1).bit_length())
        idle = self._idle.setdefault(size, deque())
        return Lease(self._done(idle) or self._new(size), idle, n_bytes)

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """A host tensor's copy on the device, which the host does not wait for."""
        plain = values.contiguous()
        n_bytes = plain.numel() * plain.element_size()
        lease = self.lease(n_bytes)
        lease.memory.numpy()[:] = plain.numpy().reshape(-1).view(np.uint8)
        there = lease.memory.to(self._device, non_blocking=True, copy=True)
        lease.note()
        return there.view(plain.dtype).view(plain.shape)

    def _done(self, idle: deque[_Place]) -> _Place | None:
        """The one that has been idle for longest, if no copy needs it any more."""
        try:
            place = idle.popleft()
        except IndexError:
            return None
        is_done = False
        try:
            is_done = place.done.query()
        finally:
            if not is_done:
                idle.appendleft(place)  # where the device is lost, too
        return place if is_done else None

    def _new(self, size: int) -> _Place:
        # Outside of inference mode: such a tensor could not be written to in another.
        with torch.inference_mode(False):
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        return _Place(memory, self._new_mark())


@cache
def page_locked(device: torch.device) -> PageLocked:
    """A device's, for the life of the process. On a CPU plain memory, whose copies are done at
    once."""
    return PageLocked(device) if device.type != "cpu" else PageLocked(device, Passed, pin=False)
