"""Every shipped kernel compiles for every card we name and stays within its budget (no GPU)."""

from __future__ import annotations

import pytest

from kernels.jit.budget import all_checks, home, other_checks, over_budget
from kernels.jit.cubin_cache import Resources
from kernels.jit.kernel import Variant
from kernels.jit.occupancy import LIMITS, blocks_per_multiprocessor
from kernels.jit.shipped import ARCHITECTURES, compile_all, shipped_variants
from tests.house_rules.sources import cuda_files, relative

VARIANTS = shipped_variants()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All programs at home, two at a time; the tests then read them from memory."""
    compile_all((variant, home(variant)) for variant in VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: str(variant.kernel()))
def test_stays_within_its_budget(variant: Variant) -> None:
    """Registers, spills, shared memory, and a block that fits, on sm_86."""
    assert over_budget(variant, home(variant)) is None


def test_the_hungriest_stay_within_it_elsewhere() -> None:
    """sm_80, sm_89 and sm_90."""
    checks = other_checks(VARIANTS)
    compile_all(checks)
    assert {sm for _, sm in checks} == {80, 89, 90}
    found = {f"{variant.kernel()} sm_{sm}": over_budget(variant, sm) for variant, sm in checks}
    assert {name: reason for name, reason in found.items() if reason} == {}


def test_the_matrix_is_whole() -> None:
    """Every variant at home, and every entry on every card it is for."""
    entries = {(v.source.path, v.entry, sm) for v, sm in all_checks(VARIANTS)}
    seen = [*((v, home(v)) for v in VARIANTS), *other_checks(VARIANTS)]
    assert {(v.source.path, v.entry, sm) for v, sm in seen} == entries


def test_every_source_has_a_shipped_variant() -> None:
    """A .cu file that no SHIPPED names would never be compiled before a user's card does it."""
    listed = {variant.source.path for variant in VARIANTS}
    present = {relative(path).removeprefix("kernels/") for path in cuda_files()}
    assert present - listed == set()


@pytest.mark.parametrize(
    ("took", "threads", "dynamic", "sm", "expect"),
    [
        (Resources(32, 0, 0), 256, 0, 86, 6),  # 48 warps are the limit
        (Resources(32, 0, 0), 256, 0, 90, 8),
        (Resources(64, 0, 0), 256, 0, 86, 4),  # 32 warps of 2,048 registers each
        (Resources(128, 0, 0), 256, 0, 86, 2),
        (Resources(255, 0, 0), 256, 0, 86, 1),
        (Resources(32, 0, 6272), 256, 0, 86, 6),
        (Resources(32, 0, 0), 128, 30 * 1024, 86, 3),
        (Resources(16, 0, 0), 32, 0, 86, 16),  # blocks are the limit
        (Resources(32, 0, 0), 256, 100 * 1024, 86, 0),
    ],
)
def test_occupancy_by_hand(
    took: Resources, threads: int, dynamic: int, sm: int, expect: int
) -> None:
    """The limits one after another."""
    assert blocks_per_multiprocessor(took, threads, dynamic, sm) == expect
    assert set(LIMITS) == set(ARCHITECTURES)
