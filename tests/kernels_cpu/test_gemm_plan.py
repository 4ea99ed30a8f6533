"""How many rows are cut into units: by hand, and properties that the kernels rely on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.linear.gemm_plan import (
    LEAST_STEPS,
    TileCost,
    limit_multiprocessors,
    plan_units,
    share_of_card,
)
from kernels.linear.strip_gemm import TILES, GemmAmpere
from kernels.linear.strip_gemm_hopper import GemmHopper
from kernels.spec.op import OpKey

WIDE, LOW = "wide", "low"
COSTS = {
    WIDE: TileCost(n=128, m=128, blocks=1, step=2.0, lone=2.0, fixed=1.0),
    LOW: TileCost(n=128, m=64, blocks=3, step=1.2, lone=0.6, fixed=1.0),
}
ONE = {WIDE: 1, LOW: 1}


def test_the_smaller_tile_where_rows_are_few() -> None:
    """64 rows of 100 tiles: a wide tile would compute twice what is asked."""
    plan = plan_units(
        COSTS,
        64,
        12800,
        steps=32,
        chunk_steps=ONE,
        multiprocessors=132,
        most_tiles_shared=1024,
        splits=1,
    )
    assert (plan.tile, plan.splits, plan.units) == (LOW, 1, 100)


def test_few_tiles_split_a_long_k() -> None:
    """16 tiles on 132 multiprocessors: eight shares of K cost an eighth and a sum."""
    plan = plan_units(
        {WIDE: COSTS[WIDE]},
        128,
        2048,
        steps=172,
        chunk_steps=ONE,
        multiprocessors=132,
        most_tiles_shared=1024,
    )
    assert (plan.whole, plan.splits, plan.units) == (0, 8, 128)
    assert plan.partials == 8 * 128 * 2048


def test_only_the_last_round_is_split() -> None:
    """344 tiles on 132 multiprocessors are two rounds and 80 tiles: a third of K each makes 240
    units, two rounds of a third.
    """
    plan = plan_units(
        {WIDE: COSTS[WIDE]},
        512,
        11008,
        steps=32,
        chunk_steps=ONE,
        multiprocessors=132,
        most_tiles_shared=1024,
    )
    assert (plan.whole, plan.splits, plan.units) == (264, 3, 264 + 3 * 80)
    assert plan.partials == 3 * 80 * 128 * 128


def test_left_over_tiles_run_beside_whole_ones() -> None:
    """172 tiles, two at a time on 132 multiprocessors: each has one whole tile, and the other 40
    are shared out in thirds beside them.
    """
    plan = plan_units(
        {WIDE: TileCost(n=128, m=128, blocks=2, step=1.4, lone=0.9, fixed=4.0)},
        128,
        22016,
        steps=32,
        chunk_steps=ONE,
        multiprocessors=132,
        most_tiles_shared=1024,
    )
    assert (plan.whole, plan.splits, plan.units) == (132, 3, 132 + 3 * 40)
    assert plan.partials == 3 * 40 * 128 * 128


@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 40000),
    steps=st.integers(1, 400),
    chunk=st.sampled_from((1, 4)),
    multiprocessors=st.integers(1, 200),
)
def test_no_split_is_empty(m: int, n: int, steps: int, chunk: int, multiprocessors: int) -> None:
    """The kernels give every split the same share in whole chunks, the last one what is left."""
    plan = plan_units(
        COSTS,
        m,
        n,
        steps=steps,
        chunk_steps={WIDE: chunk, LOW: chunk},
        multiprocessors=multiprocessors,
        most_tiles_shared=64,
    )
    cost = COSTS[plan.tile]
    shared = -(-m // cost.m) * -(-n // cost.n) - plan.whole
    assert plan.units == plan.whole + shared * plan.splits
    assert plan.partials == shared * plan.splits * cost.n * cost.m
    assert shared == 0 if plan.splits == 1 else plan.whole % multiprocessors == 0
    if plan.splits > 1:
        chunks = -(-steps // chunk)
        share = -(-chunks // plan.splits)
        assert (plan.splits - 1) * share < chunks
        assert share * chunk >= LEAST_STEPS
        assert 0 < shared <= 64


def test_what_cannot_be_split_says_so() -> None:
    """A forced number of splits is never ignored."""
    with pytest.raises(ValueError, match="16 splits do not fit 8 steps"):
        plan_units(
            COSTS,
            64,
            64,
            steps=8,
            chunk_steps=ONE,
            multiprocessors=132,
            most_tiles_shared=1024,
            splits=16,
        )


def test_a_limit_holds_inside_and_ends() -> None:
    """Nested limits too; never less than one multiprocessor, never more than there are."""
    assert share_of_card(132) == 132
    with limit_multiprocessors(100):
        assert share_of_card(132) == 100
        assert share_of_card(20) == 20
        with limit_multiprocessors(0):
            assert share_of_card(132) == 1
        assert share_of_card(132) == 100
    assert share_of_card(132) == 132


def test_shared_memory_of_every_tile_fits_an_sm86_block() -> None:
    """99 KiB a block there; 128 bytes are static."""
    for tile in TILES:
        for bits in (3, 4):
            for group in (0, 32, 64, 128):
                assert tile.shared_bytes(bits, group, offsets=True) + 128 <= 99 * 1024


def test_refusals_name_the_reason() -> None:
    """Each backend says what it cannot do."""
    key = OpKey("linear", "cuda", "float16", 128, 256, 256, 4, 64, sm=86)
    assert GemmAmpere().refuse(key) is None
    assert GemmHopper().refuse(key) == "made of sm_90a's own instructions, this is sm_86"
    assert GemmHopper().refuse(OpKey("linear", "cpu", "float16")) == "runs on a GPU only"
    half = OpKey("linear", "cuda", "bfloat16", 128, 256, 256, 4, 64, sm=90)
    assert GemmHopper().refuse(half) == "multiplies fp16 activations, not bfloat16"
    odd = OpKey("linear", "cuda", "float16", 128, 256, 256, 4, 48, sm=90)
    assert "group 48" in str(GemmAmpere().refuse(odd))
