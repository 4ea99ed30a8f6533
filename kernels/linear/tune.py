"""Measuring every CUDA backend on this card, and turning the times into rows of a tuned table.

The deciding part is pure and tested without a GPU; `ShapeTimer` is what measures. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from kernels.jit.timing import copies_for, graph_times
from kernels.linear.cost import weight_bytes
from kernels.linear.cuda import BACKENDS, CudaBackend, StripBackend
from kernels.linear.row_policy import MOST_ROWS
from kernels.linear.strip import StripWeights, to_strips
from kernels.linear.weights import LinearFn
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.device import card_name, compute_capability
from kernels.spec.op import OpKey
from kernels.spec.tuned import TunedRow, user_table, write_table

TUNED_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 511, 1023, 2047)
"""Numbers of rows that are measured; each speaks for all down to the one before it."""
WORTH_IT = 0.97
"""A backend takes over from the one for fewer rows only where it needs at most this of its time:
a table that changes its mind at every step would be noise.
"""
HOPELESS, HOPELESS_FROM = 12.0, 64
"""A backend that needs so many times the best with at least so many rows is not asked with more.
With few rows it may only be paying a fixed price.
"""
ITERATIONS, WARMUP = 7, 2
MOST_COPIES = 8
RowTimer = Callable[[int], float]
"""Milliseconds of one call with so many rows."""
Timer = Callable[[CudaBackend, OpKey], RowTimer]
"""For one backend and shape."""
Progress = Callable[[str, int, int], None]
"""(what, done, total)."""
Times = dict[int, dict[str, float]]
"""rows -> backend -> milliseconds."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of layer to tune."""

    n: int
    k: int
    bits: int
    group: int

    def __str__(self) -> str:
        return f"{self.n}x{self.k} W{self.bits}"

    def key(self, sm: int) -> OpKey:
        """The question to a backend, its rows left open."""
        return OpKey("linear", "cuda", "float16", 0, self.n, self.k, self.bits, self.group, sm=sm)


def tune(
    shapes: Sequence[Shape],
    timer_for: Callable[[Shape], Timer],
    progress: Progress,
    backends: Sequence[CudaBackend] = BACKENDS,
    sm: int = 0,
) -> list[TunedRow]:
    """Rows for all shapes; a shape that no backend takes makes none."""
    found: list[TunedRow] = []
    for done, shape in enumerate(shapes):
        progress(f"{shape}", done, len(shapes))
        found += table_rows(shape, time_shape(shape, timer_for(shape), backends, sm))
    progress("done", len(shapes), len(shapes))
    return found


def time_shape(shape: Shape, timer: Timer, backends: Sequence[CudaBackend], sm: int) -> Times:
    """Every backend at every number of rows that it takes, less the hopeless."""
    timers = {backend.name: timer(backend, shape.key(sm)) for backend in backends}
    times: Times = {}
    left = list(backends)
    for rows in TUNED_ROWS:
        key = replace(shape.key(sm), m=rows)
        takers = [backend for backend in left if backend.refuse(key) is None]
        times[rows] = {backend.name: timers[backend.name](rows) for backend in takers}
        if rows >= HOPELESS_FROM:
            worst = HOPELESS * min(times[rows].values(), default=0.0)
            left = [one for one in left if times[rows].get(one.name, worst) <= worst]
    return times


def table_rows(shape: Shape, times: Mapping[int, Mapping[str, float]]) -> Iterator[TunedRow]:
    """times: rows -> backend -> ms. Neighbours with the same winner become one row."""
    spans: list[tuple[int, int, str, list[str]]] = []
    first, winner = 1, ""
    for rows, found in times.items():
        if not found:
            continue
        best = min(found, key=lambda name: found[name])
        if winner not in found or found[best] <= WORTH_IT * found[winner]:
            winner = best
        note = f"{found[winner] * 1e3:.1f} us at {rows}"
        if spans and spans[-1][2] == winner:
            begun, _, _, notes = spans[-1]
            spans[-1] = begun, rows, winner, [*notes, note]
        else:
            spans.append((first, rows, winner, [note]))
        first = rows + 1
    for index, (begun, last, name, notes) in enumerate(spans):
        is_last = index == len(spans) - 1
        yield TunedRow(
            "linear",
            name,
            "tuned here: " + ", ".join(notes),
            (shape.bits,),
            (begun, MOST_ROWS - 1 if is_last else last),
            (shape.n, shape.n),
            (shape.k, shape.k),
        )


class ShapeTimer:
    """The Timer of the current CUDA device for one shape: graphs over rotated copies of random
    weights, re-laid once for all backends that read strips.
    """

    def __init__(self, shape: Shape) -> None:
        key = shape.key(0)
        count = min(MOST_COPIES, copies_for(weight_bytes(key)))
        self._layers = [_random_layer(key, seed) for seed in range(count)]
        self._strips: list[StripWeights] = []

    def __call__(self, backend: CudaBackend, key: OpKey) -> RowTimer:
        functions: list[LinearFn] = []

        def milliseconds(rows: int) -> float:
            if not functions:
                functions.extend(self._prepare(backend))
            x = torch.randn(rows, key.k, device="cuda", dtype=torch.float16)
            calls = [lambda run=run: run(x) for run in functions]  # type: ignore[misc]
            return median(graph_times(calls, ITERATIONS, WARMUP))

        return milliseconds

    def _prepare(self, backend: CudaBackend) -> list[LinearFn]:
        if not isinstance(backend, StripBackend):
            return [backend.prepare(layer, torch.float16) for layer in self._layers]
        if not self._strips:
            self._strips = [to_strips(layer) for layer in self._layers]
        return [backend.prepare_strips(strips, torch.float16) for strips in self._strips]


def tune_this_card(shapes: Sequence[Shape], progress: Progress) -> tuple[Path, list[TunedRow]]:
    """Measure, and write the user's own table for the current CUDA device, which processes started
    later will ask first. Returns where it is, and its rows.
    """
    sm = compute_capability(torch.device("cuda"))
    rows = tune(shapes, ShapeTimer, progress, sm=sm)
    path = user_table(sm, card_name())
    head = f"Measured on this {card_name()} (sm_{sm}) by deepinfer-sm86 tune.\nDelete to forget."
    write_table(path, rows, head)
    return path, rows


def _random_layer(key: OpKey, seed: int) -> PackedLinear:
    draw = torch.Generator(device="cuda").manual_seed(seed)
    size = (key.n, -(-key.k * key.bits // 8))
    codes = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda", generator=draw)
    groups = -(-key.k // key.group)
    scales = torch.rand((key.n, groups), device="cuda", generator=draw) * 0.02 + 0.005
    return PackedLinear(key.bits, key.group, key.k, codes, scales.half())
