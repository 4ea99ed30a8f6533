"""A prefill and decode steps side by side on two streams: what each costs the other.

Both are captured in CUDA graphs, so that no Python stands between their launches. Knows no kernel.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

ALONE_STEPS, ALONE_PREFILLS = 20, 5
LEAST_MS = 25.0
"""Prefills are repeated until they last so long."""


@dataclass(frozen=True)
class Overlap:
    """Milliseconds of each prefill and of each decode step, alone and while the other runs."""

    prefill_alone: list[float]
    prefill_beside: list[float]
    decode_alone: list[float]
    decode_beside: list[float]


def run_beside(prefill: Callable[[], None], decode: Callable[[], None]) -> Overlap:
    """Decode steps follow each other on one stream for as long as prefills do on another."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    prefills, steps = captured(prefill, streams[0]), captured(decode, streams[1])
    prefill_alone = times(prefills, streams[0], ALONE_PREFILLS)
    decode_alone = times(steps, streams[1], ALONE_STEPS)
    prefill_ms, step_ms = statistics.median(prefill_alone), statistics.median(decode_alone)
    rounds = max(2, math.ceil(LEAST_MS / prefill_ms))
    start = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record(streams[0])
    streams[1].wait_event(start)
    first = marks(prefills, streams[0], rounds)
    second = marks(steps, streams[1], math.ceil(1.3 * rounds * prefill_ms / step_ms) + 2)
    torch.cuda.synchronize()
    end = start.elapsed_time(first[-1][1])
    beside = [a.elapsed_time(b) for a, b in second if start.elapsed_time(b) <= end]
    # A step that starts inside the prefill and ends after it has met it too.
    beside = beside or [second[0][0].elapsed_time(second[0][1])]
    return Overlap(prefill_alone, [a.elapsed_time(b) for a, b in first], decode_alone, beside)


def captured(run: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Run once to compile and allocate, then record."""
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


Marks = list[tuple[torch.cuda.Event, torch.cuda.Event]]


def marks(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, count: int) -> Marks:
    """Replays, each between two events; nothing is waited for."""
    pairs = []
    with torch.cuda.stream(stream):
        for _ in range(count):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            graph.replay()
            pair[1].record()
            pairs.append(pair)
    return pairs


def times(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, count: int) -> list[float]:
    """Milliseconds of each of `count` replays after one that is thrown away."""
    pairs = marks(graph, stream, count + 1)
    stream.synchronize()
    return [start.elapsed_time(end) for start, end in pairs[1:]]
