"""Which kernel, in which shape, for so many rows and strips on a card. Pure arithmetic.

What decides is how many strips there are for each multiprocessor: few strips want many warps along
K, many strips short blocks. Thresholds and shapes are the best of a sweep on an H200 (sm_90); on
the smaller cards of sm_86 most layers have more strips for each multiprocessor, so they take the
shapes of wide layers here. Kept apart so that re-measuring changes this file only.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.linear.strip_batch import BatchTile
from kernels.linear.strip_gemv import GemvTile


@dataclass(frozen=True, slots=True)
class Batch:
    """strip_batch.cu in a shape, K in `splits` shares."""

    tile: BatchTile
    splits: int


Choice = GemvTile | Batch

ALONG_K = GemvTile(8, warps=16, unroll=1, resident=2)
ALONG_LONG_K = {
    4: GemvTile(8, warps=16, unroll=2, prefetch=True),
    3: GemvTile(8, warps=16, unroll=1, prefetch=True),
}
MIDDLE = GemvTile(8, warps=8, unroll=1, resident=4)
WIDE = GemvTile(8, warps=4, unroll=1, resident=8)
WIDE_PAIRS = GemvTile(8, warps=4, unroll=1, strips=2, resident=5)

ALONG_K_16 = GemvTile(16, warps=16, unroll=1)
ALONG_K_PAIRS_16 = GemvTile(16, warps=16, unroll=1, strips=2)
MIDDLE_16 = GemvTile(16, warps=8, unroll=1, resident=3)
WIDE_PAIRS_16 = GemvTile(16, warps=4, unroll=1, strips=2, resident=4)

BATCH_ROWS = (32, 48, 64)


def choose_kernel(m: int, strips: int, steps: int, bits: int, multiprocessors: int) -> Choice:
    """For m rows of x (1 .. 64), N = 16 * strips, K = steps of strip.STEP_COLUMNS[bits]."""
    share = strips / multiprocessors
    if m <= 8:
        return _few(share, steps, bits)
    if m <= 16:
        return _some(share)
    return _many(m, strips, steps, bits, multiprocessors)


def _few(share: float, steps: int, bits: int) -> GemvTile:
    """Up to 8 rows. share: strips for each multiprocessor."""
    is_long = steps * (2 if bits == 3 else 1) >= 64
    if share <= 1.75:
        return ALONG_LONG_K[bits] if is_long and share <= 1 else ALONG_K
    if share <= 5.5:
        return MIDDLE
    return WIDE_PAIRS if steps <= 16 and bits == 4 else WIDE


def _some(share: float) -> GemvTile:
    """9 to 16 rows."""
    if share <= 1:
        return ALONG_K_16
    if share <= 1.75:
        return ALONG_K_PAIRS_16
    return MIDDLE_16 if share <= 5.5 else WIDE_PAIRS_16


def _many(m: int, strips: int, steps: int, bits: int, multiprocessors: int) -> Batch:
    """17 to 64 rows."""
    rows = next(each for each in BATCH_ROWS if m <= each)
    tile = BatchTile(rows, row_warps=4, strips=1, stages=3 if bits == 4 else 2)
    tiles = -(-strips // tile.block_strips)
    return Batch(tile, max(1, min(steps // 4, round(multiprocessors / tiles))))


def shipped_tiles(bits: int) -> tuple[GemvTile | BatchTile, ...]:
    """Every shape that choose_kernel() may return."""
    few = (ALONG_K, ALONG_LONG_K[bits], MIDDLE, WIDE, WIDE_PAIRS)
    some = (ALONG_K_16, ALONG_K_PAIRS_16, MIDDLE_16, WIDE_PAIRS_16)
    many = (_many(rows, 128, 16, bits, 132).tile for rows in BATCH_ROWS)
    return (*few, *some, *many)
