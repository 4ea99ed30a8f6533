"""Zeroed counters for kernels whose blocks meet at the end: every queue of launches has its own.

Launches of one stream, or of one captured graph, run one after another and each leaves its counters
at zero, so they can share them; two streams, or two graphs, may run at the same time and cannot.
Taken once for all layers of a device: filling fresh ones with zeros would cost a launch each time.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.jit import driver

LANES = 256
"""Streams and captured graphs that get counters without an allocation of their own."""
COUNTERS = 1024
"""Of each; a kernel never lets more groups of blocks than that meet."""


class Counters:
    """Lanes of zeroed i32[COUNTERS], each for whoever comes with the same key."""

    def __init__(self, device: torch.device, lanes: int = LANES) -> None:
        self._device = device
        self._free = list(torch.zeros(lanes, COUNTERS, dtype=torch.int32, device=device))
        self._taken: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, key: tuple[int, int]) -> torch.Tensor:
        """The lane of `key`, for good: nobody tells when a stream or a graph is gone. Beyond LANES
        a lane is a tensor of its own, which a capture zeroes anew at every replay.
        """
        lane = self._taken.get(key)
        if lane is None:
            fresh = (
                self._free.pop()
                if self._free
                else torch.zeros(COUNTERS, dtype=torch.int32, device=self._device)
            )
            lane = self._taken.setdefault(key, fresh)
        return lane


@cache
def counters_on(device: torch.device) -> Counters:
    """Those of a device. Ask once before a capture: that takes them outside the graph's memory."""
    return Counters(device)


def queue_key() -> tuple[int, int]:
    """(stream, capture): equal for launches that run one after another. Of torch's current stream;
    capture is 0 where nothing is captured.
    """
    stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    return stream, driver.capture_of(stream) if torch._C._cuda_isCurrentStreamCapturing() else 0
