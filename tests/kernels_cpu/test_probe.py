"""The load-time probes choose by time alone; time is scripted here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.linear.probe import crossover, fastest_dense


class ScriptedTimer:
    """Runs the candidate, then answers with the next of the given times."""

    def __init__(self, times: list[float]) -> None:
        self.times = list(times)

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        return self.times.pop(0)


@pytest.mark.parametrize(
    ("packed", "dense", "expect"),
    [
        ([1, 2, 5, 4, 6], [3, 3, 3, 3, 3], 2),
        ([9, 9, 9], [1, 1, 1], 0),
        ([9, 9, 1, 9, 9, 9], [2, 3, 3, 2, 2, 2], 1),
        ([1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2], 32),
    ],
)
def test_crossover_is_the_last_count_that_packed_wins(
    packed: list[float], dense: list[float], expect: int
) -> None:
    """Asked at 1, 2, 4 ... rows until dense wins three rounds, the best of each counting."""
    times = [t for pair in zip(packed, dense, strict=True) for t in pair]
    timer = ScriptedTimer(times)
    assert crossover([(lambda x: x, lambda x: x, 8)], timer) == expect
    assert timer.times == []


def test_fastest_dense_takes_the_least_time() -> None:
    """Two timings a candidate; the last candidate is always plain fp32."""
    calls = 6 if len(_candidates()) == 3 else 4
    backend, dtype = fastest_dense(ScriptedTimer([5.0] * (calls - 2) + [1.0, 1.0]))
    assert (backend.name, dtype) == ("dense", torch.float32)


def _candidates() -> list[str]:
    from kernels.linear.dense import half_is_available

    return ["half", "bf16", "fp32"] if half_is_available() else ["bf16", "fp32"]


def test_fastest_dense_on_this_machine() -> None:
    """Real time: any of the candidates, and it multiplies."""
    backend, dtype = fastest_dense()
    assert backend.name in ("cpu.half", "dense")
    assert dtype in (torch.float32, torch.bfloat16)
