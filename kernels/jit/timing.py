"""GPU times without Python in them: launches captured in one CUDA graph, timed by events.

Weights are rotated so that a launch does not find in L2 what the one before it left there. Knows no
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

ROTATED_BYTES = 192 << 20
"""What the launches between two looks at the same weights read; the L2 of an H200 holds 60 MiB."""
MOST_COPIES = 32
GRAPH_MS = 0.4
"""A graph lasts at least so long, so that its own start does not count."""

Call = Callable[[], object]


def copies_for(weight_bytes: int) -> int:
    """How many copies of a layer to rotate."""
    return max(2, min(MOST_COPIES, math.ceil(ROTATED_BYTES / max(weight_bytes, 1))))


def graph_times(calls: Sequence[Call], iterations: int, warmup: int) -> list[float]:
    """Milliseconds of one call, a value a replay; `calls` are run in turn within a graph."""
    for call in calls:
        call()  # compiles, allocates
    once = _milliseconds(lambda: [call() for call in calls]) / len(calls)
    rounds = max(1, math.ceil(GRAPH_MS / (max(once, 1e-3) * len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = [_milliseconds(graph.replay) for _ in range(warmup + iterations)]
    return [time / (rounds * len(calls)) for time in times[warmup:]]


def _milliseconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
