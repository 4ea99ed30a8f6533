"""Which shape of a block for so many rows and strips on a card. Pure arithmetic.

What decides is how many strips there are for each multiprocessor: few strips want many warps along
K, many strips short blocks with several strips each. Thresholds and shapes are the best of a sweep
on an H200 (sm_90). The smaller cards of sm_86 have more strips for each multiprocessor, so most
layers take the shapes of wide ones there. Kept apart so that re-measuring changes this file only.
"""

from __future__ import annotations

from kernels.linear import strip_stream
from kernels.linear.strip import StripWeights
from kernels.linear.strip_gemv import GemvTile
from kernels.linear.strip_stream import StreamTile

FEW, MIDDLE = 1.75, 5.5
"""Strips for each multiprocessor: below FEW a layer is narrow, above MIDDLE it is wide."""
SHORT_STEPS = 16
"""K in steps of 128: up to here a turn or two is all."""
MOST_SHORT = 16
"""A short layer with more strips than so many for each multiprocessor is a head: many waves."""

STREAM_ROWS = 16
"""Up to so many rows a grid that stays may be faster for many strips. 0 switches it off."""
STREAM_16 = {(2048, 4): MIDDLE, (2048, 3): MIDDLE, (3584, 4): 16.0, (3584, 3): MIDDLE}
"""Beyond 8 rows it takes more strips than so many for each multiprocessor, by columns and bits."""
NORMED_SHARE, NORMED_ROWS = 16.0, 5
"""A normed product, which is a decode step's, takes it beyond so many strips for each
multiprocessor (gate and up of a 7B), or from so many rows on. Between launches that begin early a
grid that stays keeps its neighbours out, which costs a 3B with few rows what it gains
(docs/results/2026-11-30-stream-in-step.json).
"""
ONE_WAVE = (16, 20)
"""Strips for each multiprocessor that WAVE_PAIRS has all in flight at once."""

ALONE = {
    4: GemvTile(8, warps=32, unroll=1),
    3: GemvTile(8, warps=28, unroll=1, signed=True),
}
ALONG_K = {
    4: GemvTile(8, warps=16, unroll=1, resident=2),
    3: GemvTile(8, warps=14, unroll=1, resident=2, signed=True),
}
ALONE_SHORT = {4: ALONG_K[4], 3: GemvTile(8, warps=16, unroll=1, signed=True)}
"""Where 32 warps would not all have a step: the kernel behind it finds room earlier."""
HALF_K = {
    4: GemvTile(8, warps=8, unroll=2, resident=3),
    3: GemvTile(8, warps=9, unroll=1, resident=3, signed=True),
}
WIDE = GemvTile(8, warps=4, unroll=1, resident=8, signed=True)
WIDE_PAIRS = {
    4: GemvTile(8, warps=4, unroll=1, strips=2, resident=6, signed=True),
    3: GemvTile(8, warps=4, unroll=1, strips=2, resident=5, signed=True),
}
WAVE_PAIRS = GemvTile(8, warps=2, unroll=1, strips=2, resident=10, signed=True)
WIDE_FOURS = GemvTile(8, warps=4, unroll=1, strips=4, resident=3)

ALONG_K_16 = GemvTile(16, warps=16, unroll=1, prefetch=True, signed=True)
ALONG_K_PAIRS_16 = {
    4: GemvTile(16, warps=16, unroll=1, strips=2),
    3: GemvTile(16, warps=16, unroll=1, strips=2, signed=True),
}
HALF_K_16 = {
    4: GemvTile(16, warps=8, unroll=1, resident=3),
    3: GemvTile(16, warps=8, unroll=1, resident=3, signed=True),
}
WIDE_PAIRS_16 = {
    4: GemvTile(16, warps=4, unroll=1, strips=2, resident=5, signed=True),
    3: GemvTile(16, warps=4, unroll=1, strips=2, resident=4, signed=True),
}
WIDE_SHORT_16 = {
    4: GemvTile(16, warps=4, unroll=1, strips=3, resident=4, signed=True),
    3: GemvTile(16, warps=2, unroll=1, resident=12, signed=True),
}

ALONG_K_32 = GemvTile(32, warps=16, unroll=1, prefetch=True)
ALONG_K_PAIRS_32 = GemvTile(32, warps=16, unroll=1, strips=2)
HALF_K_PAIRS_32 = GemvTile(32, warps=8, unroll=1, strips=2, resident=2)
EARLY_PAIRS_32 = GemvTile(32, warps=4, unroll=1, strips=2, prefetch=True, resident=3)
WIDE_32 = {
    4: GemvTile(32, warps=4, unroll=1, strips=4, resident=3),
    3: GemvTile(32, warps=4, unroll=1, strips=2, resident=4),
}


def choose_tile(m: int, strips: int, columns: int, bits: int, multiprocessors: int) -> GemvTile:
    """For m rows of x (from 1), N = 16 * strips, K = columns. More than 32 rows take turns."""
    share = strips / multiprocessors
    steps = columns // 128
    if m <= 8:
        return _up_to_8(share, steps, bits)
    if m <= 16:
        return _up_to_16(share, steps, bits)
    if share > MIDDLE:
        return WIDE_32[bits]
    if share > FEW:
        return HALF_K_PAIRS_32 if m <= 32 else EARLY_PAIRS_32
    if m <= 32:
        return ALONG_K_PAIRS_32 if share > 1 else ALONG_K_32
    return HALF_K_PAIRS_32 if share > 1 else ALONG_K_PAIRS_32


def choose_stream(
    m: int, weights: StripWeights, sm: int, multiprocessors: int
) -> StreamTile | None:
    """For m rows of x: a grid that stays while strips stream by; None where it does not pay."""
    if m > STREAM_ROWS or sm != strip_stream.SM:
        return None
    rows = 8 if m <= 8 else 16
    columns = weights.padded_columns
    if strip_stream.refuse_stream(weights.group, columns, rows) is not None:
        return None
    least = MIDDLE if rows == 8 else STREAM_16[columns, weights.bits]
    if weights.strips / multiprocessors <= least:
        return None
    return strip_stream.stream_tile(columns, rows)


def choose_normed_stream(
    m: int, weights: StripWeights, sm: int, multiprocessors: int
) -> StreamTile | None:
    """The same for m rows of x that the product norms."""
    if m < NORMED_ROWS and weights.strips / multiprocessors <= NORMED_SHARE:
        return None
    return choose_stream(m, weights, sm, multiprocessors)


def _up_to_8(share: float, steps: int, bits: int) -> GemvTile:
    is_short = steps <= SHORT_STEPS
    if share <= 1:
        return ALONE_SHORT[bits] if is_short else ALONE[bits]
    if share <= FEW:
        return ALONG_K[bits]
    if share <= MIDDLE:
        return HALF_K[bits]
    if bits == 4:
        return WIDE_PAIRS[bits] if is_short else WIDE
    if is_short:
        return WIDE_FOURS
    return WAVE_PAIRS if ONE_WAVE[0] < share <= ONE_WAVE[1] else WIDE_PAIRS[bits]


def _up_to_16(share: float, steps: int, bits: int) -> GemvTile:
    if share <= FEW:
        return ALONG_K_16 if share <= 1 else ALONG_K_PAIRS_16[bits]
    if share <= MIDDLE:
        return HALF_K_16[bits]
    is_short = steps <= SHORT_STEPS and share <= MOST_SHORT
    return WIDE_SHORT_16[bits] if is_short else WIDE_PAIRS_16[bits]
