"""From times to rows of a table, with a timer that is told what to say."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.linear.row_policy import MOST_ROWS, choose_for_rows
from kernels.linear.tune import TUNED_ROWS, RowTimer, Shape, table_rows, time_shape, tune
from kernels.linear.weights import LinearFn, Weights
from kernels.spec.op import OpKey
from kernels.spec.tuned import TunedRow, TunedTable

SHAPE = Shape(64, 128, 4, 32)


@dataclass(frozen=True)
class Timed:
    """Takes up to `most` rows; a call costs start + each * rows."""

    name: str
    start: float
    each: float
    most: int = 1 << 30

    def refuse(self, key: OpKey) -> str | None:
        return None if key.m <= self.most else "too many rows"

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        raise NotImplementedError


FEW, MANY = Timed("few", 1.0, 1.0, most=300), Timed("many", 60.0, 0.1)


def told(backend: object, key: OpKey) -> RowTimer:
    """The timer."""
    assert isinstance(backend, Timed)
    return lambda rows: backend.start + backend.each * rows


def test_each_backend_gets_the_rows_it_wins() -> None:
    """64 rows: 65 against 66.4, 96 rows: 97 against 69.6."""
    seen: list[tuple[str, int, int]] = []
    rows = tune([SHAPE], lambda shape: told, lambda *step: seen.append(step), (FEW, MANY))
    assert [(row.backend, row.m) for row in rows] == [
        ("few", (1, 64)),
        ("many", (65, MOST_ROWS - 1)),
    ]
    assert {(row.bits, row.n, row.k) for row in rows} == {((4,), (64, 64), (128, 128))}
    assert rows[0].evidence.startswith("tuned here: 2000.0 us at 1, 3000.0 us at 2")
    assert seen == [("64x128 W4", 0, 1), ("done", 1, 1)]
    table = TunedTable("mine", tuple(rows))
    for m, expect in ((1, "few"), (64, "few"), (65, "many"), (5000, "many")):
        key = OpKey("linear", "cuda", "float16", m, 64, 128, 4, 32)
        assert choose_for_rows((FEW, MANY), key, "tuned", (table,))[1].backend == expect


def test_the_hopeless_are_not_asked_again() -> None:
    """What needs twelve times the best at 64 rows will not win at 2,047, and costs seconds."""
    slow = Timed("slow", 0.0, 20.0)
    times = time_shape(SHAPE, told, (FEW, MANY, slow), 0)
    assert max(rows for rows, found in times.items() if "slow" in found) == 64
    assert set(times[2047]) == {"many"}


@pytest.mark.parametrize(
    ("second", "winners"),
    [
        ({"a": 10.0, "b": 9.9}, ["a"]),  # within the noise
        ({"a": 10.0, "b": 9.0}, ["a", "b"]),
        ({"b": 20.0}, ["a", "b"]),  # the old one refuses
        ({}, ["a"]),
    ],
)
def test_a_table_does_not_follow_noise(second: dict[str, float], winners: list[str]) -> None:
    """The next backend has to be clearly faster, or the only one left."""
    rows = list(table_rows(SHAPE, {8: {"a": 1.0, "b": 2.0}, 16: second}))
    assert [row.backend for row in rows] == winners
    assert rows[0].m[0] == 1
    assert rows[-1].m[1] == MOST_ROWS - 1


def test_bounds_fit_the_dispatcher() -> None:
    """Above 256 rows a policy may change at powers of two only."""
    assert all(rows <= 256 or (rows + 1) & rows == 0 for rows in TUNED_ROWS)
    assert list(table_rows(SHAPE, {1: {}})) == []
    assert isinstance(next(table_rows(SHAPE, {1: {"a": 1.0}})), TunedRow)
