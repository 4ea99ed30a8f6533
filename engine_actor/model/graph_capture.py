"""Recording launches into a CUDA graph. Knows torch's allocator; knows no model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

Run = Callable[[], None]


class CudaCapture:
    """Captures into one pool of memory for all graphs of a device, which therefore must not run at
    the same time: a replay overwrites what the last one left there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        # Blocks that one capture frees are found again by the next one of the same stream.
        self._stream = torch.cuda.Stream(device)
        self._mark = torch.zeros(1, device=device)
        self.nbytes = 0
        """What the living graphs took of the device: memory of the pool, and they themselves."""

    def __call__(self, run: Run) -> Run:
        """Record what `run` launches, of which nothing runs now; returns the replay, which queues
        it on torch's current stream. Raises what `run` raises, and the driver's refusals.
        """
        if not self._graphs:
            # A pool ends with the last of its graphs; torch takes no capture into it after that.
            self._pool = torch.cuda.graph_pool_handle()
            self.nbytes = 0
        before = self._free()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), no_collection():
            # thread_local: other threads may allocate and wait as they like meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        self._graphs.add(graph)
        self.nbytes += max(0, before - self._free())
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that went wrong, so that the allocator leaves its pool."""
        try:
            graph.capture_end()
        except RuntimeError:
            # Where the driver has already broken it off, torch leaves its allocator in the capture.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._release_generator()

    def _release_generator(self) -> None:
        """torch's random generator is left in the capture as well and refuses every draw until
        another capture has ended well: one that takes no memory.
        """
        graph = torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool, capture_error_mode="thread_local")
            self._mark.zero_()
            graph.capture_end()

    def _free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])


@contextmanager
def no_collection() -> Iterator[None]:
    """Python collects no garbage inside: what it destroys may free memory of the device, or unmap
    it, and that breaks a capture off.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
