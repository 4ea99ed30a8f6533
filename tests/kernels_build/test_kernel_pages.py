"""docs/kernels speaks of the kernels and formulae that there are."""

from __future__ import annotations

import re

import pytest

from kernels.jit.occupancy import SHOWN, row_head
from kernels.jit.shipped import shipped_variants
from rtx3050_estimate import BANDWIDTH, estimate_page, floor_of
from tests.house_rules.sources import ROOT

FOLDER = ROOT / "docs" / "kernels"
STALE = "stale: run scripts/write_kernel_docs.py"


def test_the_estimate_is_fresh() -> None:
    """Its figures come from the op's spec."""
    assert (FOLDER / "rtx3050_estimate.md").read_text(encoding="utf-8") == estimate_page(), STALE


def test_the_occupancy_table_has_every_kernel() -> None:
    """Compiles nothing: that registers keep their budgets is test_budgets.py's business."""
    written = (FOLDER / "occupancy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(\| `[^|]*\|[^|]*\|[^|]*\|)", written, re.MULTILINE)
    variants = [variant for variant in shipped_variants() if variant.first_sm <= SHOWN]
    assert rows == [row_head(variant) for variant in variants], STALE


def test_a_floor_by_hand() -> None:
    """One row of W4 5632x2048: 5.95 MB of weights and 15 kB of x and y at 192 GB/s."""
    floor = floor_of(4, 1, 5632, 2048)
    assert floor.bytes == 5632 * (1024 + 32) + 2 * (2048 + 5632)
    assert floor.microseconds == pytest.approx(floor.bytes / BANDWIDTH * 1e6)
    assert floor.limit == "DRAM"
    many = floor_of(4, 512, 5632, 2048)
    assert many.limit == "tensor cores"
    assert many.microseconds == pytest.approx(2 * 512 * 5632 * 2048 / 12.288e12 * 1e6)
