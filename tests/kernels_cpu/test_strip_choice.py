"""Which shape a call takes, and what the backend says no to; no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.linear.strip import StripWeights
from kernels.linear.strip_choice import choose_normed_stream, choose_stream, choose_tile
from kernels.linear.strip_few import SHIPPED, FewRows
from kernels.linear.strip_order import OrderedRows
from kernels.linear.strip_stream import SHAPES, stream_tile
from kernels.linear.strip_stream_rows import StreamRows
from kernels.spec.op import OpKey

KEY = OpKey("linear", "cuda", "float16", n=2048, k=2048, bits=4, group=128)
W4_TILES = {
    tuple(sorted(variant.defines.items()))
    for variant in SHIPPED
    if variant.defines["BITS"] == 4 and variant.defines["GROUP"] == 128
}


@given(
    m=st.integers(1, 64),
    n=st.integers(16, 152064),
    k=st.integers(64, 32768),
    multiprocessors=st.sampled_from((16, 20, 46, 108, 132)),
)
def test_every_w4_call_takes_a_shipped_shape(m: int, n: int, k: int, multiprocessors: int) -> None:
    """So that the compile check and the occupancy table speak of what runs."""
    tile = choose_tile(m, -(-n // 16), -(-k // 128) * 128, 4, multiprocessors)
    assert tuple(sorted(tile.variant(4, 128, offsets=False).defines.items())) in W4_TILES
    assert tile.rows >= min(m, 32)
    assert tile.threads <= 1024


@pytest.mark.parametrize(
    ("n", "k", "multiprocessors", "warps"),
    [
        (2048, 11008, 132, 32),  # one strip for each multiprocessor: warps share K
        (2048, 2048, 132, 16),  # a step for each of them
        (5632, 2048, 132, 8),
        (37888, 3584, 132, 4),  # many strips: short blocks
        (2048, 2048, 20, 4),  # the same layer is wide on a small card
    ],
)
def test_few_strips_take_many_warps(n: int, k: int, multiprocessors: int, warps: int) -> None:
    """The one thing that decides."""
    assert choose_tile(1, n // 16, k, 4, multiprocessors).warps == warps


@dataclass
class Shape:
    """What decides of a layer in strips."""

    strips: int
    padded_columns: int
    bits: int = 4
    group: int = 128
    offsets: None = None


@pytest.mark.parametrize(
    ("m", "shape", "sm", "is_stream"),
    [
        (1, Shape(1376, 2048), 90, True),
        (4, Shape(1792, 4096), 90, True),
        (8, Shape(1376, 2048, bits=3), 90, True),
        (9, Shape(1376, 2048, bits=3), 90, True),
        (16, Shape(1376, 2048), 90, True),
        (1, Shape(2368, 3584), 90, True),
        (16, Shape(2368, 3584), 90, True),
        (16, Shape(1184, 3584), 90, False),
        (16, Shape(1184, 3584, bits=3), 90, True),
        (17, Shape(1184, 3584, bits=3), 90, False),
        (9, Shape(1792, 4096), 90, False),  # 16 rows of them do not fit the registers
        (1, Shape(9496, 2048), 90, True),  # a head
        (1, Shape(9496, 2048, bits=3), 90, True),
        (1, Shape(1376, 2048), 86, False),  # bulk copies are Hopper's
        (1, Shape(128, 2048), 90, False),  # a strip for each multiprocessor
        (1, Shape(1376, 2048, group=64), 90, False),
        (1, Shape(1376, 2176), 90, False),  # half a warp's columns are left over
        (1, Shape(1376, 8192), 90, False),  # a strip takes too much room
    ],
)
def test_many_strips_stream_by_on_hopper(m: int, shape: Shape, sm: int, is_stream: bool) -> None:
    """And nothing changes on the cards of sm_86."""
    tile = choose_stream(m, cast("StripWeights", shape), sm, 132)
    assert (tile is not None) == is_stream
    if tile is not None:
        assert tile.warps * tile.columns == shape.padded_columns
        assert tile.rows >= m


@pytest.mark.parametrize(
    ("m", "shape", "sm", "is_stream"),
    [
        (1, Shape(2368, 3584), 90, True),  # gate and up of a 7B
        (8, Shape(2368, 3584, bits=3), 90, True),
        (4, Shape(2368, 3584), 90, True),
        (16, Shape(2368, 3584), 90, True),
        (17, Shape(2368, 3584), 90, False),
        (4, Shape(1376, 2048), 90, False),  # of a 3B
        (5, Shape(1376, 2048), 90, True),
        (16, Shape(1376, 2048, bits=3), 90, True),
        (8, Shape(160, 2048), 90, False),
        (1, Shape(2368, 3584), 86, False),
        (1, Shape(2368, 3584, group=64), 90, False),
    ],
)
def test_a_step_takes_fewer_streams(m: int, shape: Shape, sm: int, is_stream: bool) -> None:
    """Its neighbours begin early, and find no room beside one."""
    tile = choose_normed_stream(m, cast("StripWeights", shape), sm, 132)
    assert (tile is not None) == is_stream


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "warps"), sorted(SHAPES))
def test_every_symmetric_stream_is_shipped(rows: int, warps: int, gated: bool, bits: int) -> None:
    """Of those that choose_stream() takes; a compile check that knew others would prove nothing."""
    tile = stream_tile(256 * warps, rows)
    assert tile.variant(bits, 128, offsets=False, gated=gated) in SHIPPED


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("rows", "warps"), sorted(SHAPES))
def test_strips_fit_shared_memory(rows: int, warps: int, offsets: bool, bits: int) -> None:
    """227 KiB are a block's; what is on its way has slots."""
    for group in (64, 128):
        tile = stream_tile(256 * warps, rows)
        assert tile.variant(bits, group, offsets).max_shared_bytes <= 227 * 1024
        assert tile.depth >= tile.window
        assert tile.threads <= 1024


@pytest.mark.parametrize(
    ("m", "change", "reason"),
    [
        (17, {}, None),
        (24, {"bits": 3, "k": 1921}, None),
        (32, {}, None),
        (0, {}, None),  # a layer that is asked without a number of rows
        (16, {}, "16 rows of x, 17 to 32 are worth it"),
        (33, {}, "33 rows of x, 17 to 32 are worth it"),
        (24, {"sm": 86}, "made of sm_90's own instructions, this is sm_86"),
        (24, {"k": 3584}, "3584 columns are not 256 times one of (8,) for 24 rows"),
        (24, {"group": 64}, "group 64 is not 128"),
        (24, {"bits": 8}, "holds 3 or 4 bits, not 8"),
        (24, {"dtype": "bfloat16"}, "multiplies fp16 activations, not bfloat16"),
    ],
)
def test_17_to_32_rows_stream_where_x_fits(
    m: int, change: dict[str, object], reason: str | None
) -> None:
    """The registers of a multiprocessor hold all of x."""
    key = replace(replace(KEY, m=m, sm=90), **change)  # type: ignore[arg-type]
    said = StreamRows().refuse(key)
    assert said == reason or (said is not None and reason is not None and reason in said)


@pytest.mark.parametrize(
    ("m", "change", "reason"),
    [
        (17, {}, None),
        (32, {"bits": 3, "k": 3500}, None),  # 3584 with what is padded
        (0, {}, None),
        (33, {}, "33 rows of x, at most 32 are worth it"),
        (24, {"sm": 86}, "made of sm_90a's own instructions, this is sm_86"),
        (24, {"k": 11008}, "11008 columns are no multiple of 512"),
        (24, {"group": 64}, "group 64 is not 128"),
        (24, {"bits": 8}, "holds 3 or 4 bits, not 8"),
        (24, {"dtype": "bfloat16"}, "multiplies fp16 activations, not bfloat16"),
    ],
)
def test_17_to_32_rows_in_the_order_of_strips(
    m: int, change: dict[str, object], reason: str | None
) -> None:
    """Two chunks of 256 columns take turns."""
    key = replace(replace(KEY, m=m, sm=90), **change)  # type: ignore[arg-type]
    said = OrderedRows().refuse(key)
    assert said == reason or (said is not None and reason is not None and reason in said)


def test_more_rows_take_turns() -> None:
    """Blocks of neighbouring rows of x."""
    tile = choose_tile(64, 1376, 2048, 4, 132)
    assert tile.grid(64, 1376)[0] == 64 // tile.rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"m": 64, "bits": 3}, None),
        ({"m": 65}, "at most 64"),
        ({"device": "cpu"}, "GPU"),
        ({"dtype": "float32"}, "float32"),
        ({"bits": 8}, "not 8"),
        ({"group": 48}, "group 48"),
        ({"exact": True}, "fp16"),
    ],
)
def test_refusals_say_why(change: dict, reason: str | None) -> None:
    """Or None where it would run."""
    found = FewRows().refuse(replace(KEY, **change))
    assert found is None if reason is None else reason in (found or "")
