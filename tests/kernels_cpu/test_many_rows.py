"""How a product of many rows is launched, with a kernel that only notes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.linear import many_rows
from kernels.linear.many_rows import OVERLAPPING_ROWS, ManyRows
from kernels.linear.strip import to_strips
from kernels.linear.strip_gemm import TALL
from kernels.linear.strip_gemm import TILES as AMPERE
from kernels.linear.strip_gemm_hopper import TILES as HOPPER
from tests.kernels_cpu.layers import random_layer

MULTIPROCESSORS = 132


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every launch was given by name."""
    seen: list[dict[str, Any]] = []
    kernel = SimpleNamespace(launch=lambda *_, **options: seen.append(options))
    card = SimpleNamespace(multiprocessors=MULTIPROCESSORS)
    monkeypatch.setattr(many_rows, "kernel_of", lambda *_: kernel)
    monkeypatch.setattr(many_rows, "device_info", lambda _: card)
    monkeypatch.setattr(many_rows, "counters_on", lambda _: SimpleNamespace(of=lambda _: None))
    monkeypatch.setattr("kernels.linear.strip_gemm_hopper.tensor_map", lambda *_: b"")
    return seen


def test_only_few_rows_begin_before_the_kernel_ahead_has_ended(
    launches: list[dict[str, Any]],
) -> None:
    """Never the first call, never one that leaves a part of the card to others."""
    strips = to_strips(random_layer(192, 256, 4, 128, "symmetric"))
    run = ManyRows(strips, HOPPER)

    def overlaps(rows: int, max_ctas: int | None = None, run: ManyRows[Any] = run) -> bool:
        run(torch.zeros(rows, 256).half(), max_ctas=max_ctas)
        return bool(launches[-1]["launch_dependents"])

    assert [overlaps(64), overlaps(64)] == [False, True]
    assert [overlaps(OVERLAPPING_ROWS), overlaps(OVERLAPPING_ROWS + 1)] == [True, False]
    assert [overlaps(64, MULTIPROCESSORS), overlaps(64, MULTIPROCESSORS - 1)] == [True, False]
    ampere = ManyRows(strips, AMPERE)
    assert not TALL.overlaps
    assert [overlaps(64, run=ampere), overlaps(64, run=ampere)] == [False, False]
