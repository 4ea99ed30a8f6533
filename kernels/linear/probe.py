"""Which linear is faster on this very machine: a few milliseconds of timing at load.

A table by CPU name would be wrong on the next one; what decides (vector units, memory bandwidth,
threads) is there to be measured. Only the `fast` numerics ask; nothing here changes a result that
is promised to be equal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from kernels.linear.dense import CpuHalf, Dense
from kernels.linear.weights import LinearFn
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.op import OpKey

PROBE_SHAPE = (1536, 576)
"""[N, K] of the trial layer: large enough to leave the first cache levels, small enough to pack."""
PROBE_ROWS = (16, 128)
CROSSOVERS = (1, 2, 4, 8, 16, 32)
REPEATS = 2
ROUNDS = 3
"""A busy machine may spoil one timing; so often the dense copy must be faster to be believed."""

DenseChoice = tuple[CpuHalf | Dense, torch.dtype]
Timer = Callable[[Callable[[], object]], float]


def best_seconds(run: Callable[[], object]) -> float:
    """Shortest of a few runs: the one least disturbed by others."""
    run()
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)


def fastest_dense(timer: Timer = best_seconds) -> DenseChoice:
    """The backend and dtype for the dense copy of packed weights on this CPU."""
    half, dense = CpuHalf(), Dense()
    key = OpKey("linear", "cpu", "float32")
    choices: list[DenseChoice] = [(dense, torch.bfloat16), (dense, torch.float32)]
    if half.refuse(key) is None:
        choices.insert(0, (half, torch.float32))
    draw = torch.Generator().manual_seed(0)
    layer = DenseLinear(torch.randn(PROBE_SHAPE, generator=draw))
    inputs = [torch.randn(rows, PROBE_SHAPE[1], generator=draw) for rows in PROBE_ROWS]

    def seconds(choice: DenseChoice) -> float:
        run = choice[0].prepare(layer, choice[1])
        # Per row, so that decoding side by side counts as much as a prompt does.
        return sum(timer(lambda x=x: run(x)) / len(x) for x in inputs)  # type: ignore[misc]

    return min(choices, key=seconds)


def crossover(layers: Sequence[tuple[LinearFn, LinearFn, int]], timer: Timer = best_seconds) -> int:
    """Up to how many rows the packed functions beat the dense ones; 0 where dense always wins.

    layers: (packed, dense, in_features). Give as many as a forward pass reads: weights that stay in
    a large cache flatter the dense copy, which is four times the bytes.
    """
    few = 0
    for rows in CROSSOVERS:
        inputs = {width: torch.zeros(rows, width) for _, _, width in layers}

        def packed(x: dict[int, torch.Tensor] = inputs) -> None:
            for run, _, width in layers:
                run(x[width])

        def dense(x: dict[int, torch.Tensor] = inputs) -> None:
            for _, run, width in layers:
                run(x[width])

        if not _wins(packed, dense, timer):
            break
        few = rows
    return few


def _wins(packed: Callable[[], object], dense: Callable[[], object], timer: Timer) -> bool:
    """Whether the best time of packed is at most that of dense, in any of a few rounds."""
    best_packed = best_dense = math.inf
    for _ in range(ROUNDS):
        best_packed = min(best_packed, timer(packed))
        best_dense = min(best_dense, timer(dense))
        if best_packed <= best_dense:
            return True
    return False
