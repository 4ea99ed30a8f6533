"""Forward passes of fixed shape, a bucket each, replayed from CUDA graphs where one could be
captured.

A graph is captured when its bucket is first used, and dropped when the KV cache has moved. Knows
neither tensors nor layers: a pass is a function without arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch

from engine_actor.model.runner_protocol import GraphCounts

LOGGER = logging.getLogger(__name__)

B = TypeVar("B", bound=Hashable)


class Capture(Protocol):
    """As graph_capture.CudaCapture."""

    nbytes: int

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


class BucketGraphs(Generic[B]):
    """addresses: of the KV cache now. capture: None launches every pass anew; reason: why."""

    def __init__(
        self,
        addresses: Callable[[], tuple[int, ...]],
        capture: Capture | None,
        reason: str | None = None,
    ) -> None:
        self.counts = GraphCounts(reason)
        self._addresses = addresses
        self._capture = capture
        self._replays: dict[B, Callable[[], None]] = {}
        self._refused: set[B] = set()
        self._captured_at: tuple[int, ...] = ()

    def run(self, bucket: B, launch: Callable[[], None]) -> None:
        """Queue what `launch` does, which is the same for a bucket at every call: bit for bit the
        same from its graph.
        """
        replay = self._replays.get(bucket)
        if replay is not None:
            replay()
            self.counts.replays += 1
            return
        # The first run loads every kernel and takes the scratch that outlives the step: neither may
        # happen in a capture. Its logits are this step's.
        launch()
        self.counts.eager += 1
        if self._capture is not None and bucket not in self._refused:
            self._record(bucket, launch, self._capture)

    def warm_up(self, bucket: B, launch: Callable[[], None]) -> bool:
        """As run(), before anybody asks. False where memory is out: a batch of that size may meet
        that too, but nothing at start needs it.
        """
        try:
            self.run(bucket, launch)
        except (torch.OutOfMemoryError, MemoryError) as error:
            LOGGER.warning("no memory to warm up %s: %s", bucket, error)
            return False
        return True

    def cache_moved(self) -> None:
        """To be called after whatever may have moved the KV cache: drops graphs that hold addresses
        which are no longer its own.
        """
        if self._replays and self._addresses() != self._captured_at:
            self.counts.dropped += len(self._replays)
            self._replays.clear()
        self.counts.graphs = len(self._replays)
        self._refused.clear()

    def _record(self, bucket: B, launch: Callable[[], None], capture: Capture) -> None:
        here = self._addresses()
        try:
            replay = capture(launch)
        except Exception as error:
            # Nobody's request is to blame: the step has run. A device that is lost says so at the
            # next call.
            self._refused.add(bucket)
            self.counts.failures += 1
            LOGGER.warning("no CUDA graph for %s, it runs without: %s", bucket, error)
            return
        self._replays[bucket] = replay
        self._captured_at = here
        self.counts.graphs = len(self._replays)
        self.counts.nbytes = capture.nbytes
