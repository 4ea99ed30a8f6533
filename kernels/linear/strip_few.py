"""Up to 64 rows of x through W3 and W4 strips: a layer prepared.

`cuda.strip_few` runs on sm_80 and newer. The shape of a block (strip_choice.py) is a function of
layer, rows and card only, so equal calls give equal bits. Knows no model.
"""

from __future__ import annotations

import torch

from kernels.linear.carry import WHOLE_WIDTH, Carry
from kernels.linear.many_rows import refuse_many_rows, rows_for
from kernels.linear.strip import StripWeights, to_strips
from kernels.linear.strip_choice import (
    ALONE,
    ALONE_SHORT,
    ALONG_K,
    ALONG_K_16,
    ALONG_K_32,
    ALONG_K_PAIRS_16,
    ALONG_K_PAIRS_32,
    EARLY_PAIRS_32,
    HALF_K,
    HALF_K_16,
    HALF_K_PAIRS_32,
    WAVE_PAIRS,
    WIDE,
    WIDE_32,
    WIDE_FOURS,
    WIDE_PAIRS,
    WIDE_PAIRS_16,
    WIDE_SHORT_16,
    choose_normed_stream,
    choose_stream,
    choose_tile,
)
from kernels.linear.strip_gemv import GemvTile, launch_gemv
from kernels.linear.strip_stream import (
    COLUMNS,
    SHAPES,
    StreamTile,
    launch_stream,
    stream_tile,
)
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.device import device_info
from kernels.spec.op import OpKey

MOST_ROWS = 64


class StripFew:
    """A layer prepared for few rows. Call it with x [M, K]; y is fp16 [M, N]. More than 64 rows
    are right too, and slow.

    gated: W is a fused gate and up, re-laid by strip.interleave_halves(); y is silu(gate) * up,
    [M, N / 2]. launch_dependents: on sm_90 and newer a call may begin to load weights before the
    kernel ahead of it in the stream has ended.
    """

    def __init__(
        self, weights: StripWeights, gated: bool = False, launch_dependents: bool = True
    ) -> None:
        self.weights = weights
        self.gated = gated
        self.width = weights.out_features // (2 if gated else 1)
        card = device_info(weights.words.device)
        self.multiprocessors, self.sm = card.multiprocessors, card.sm
        self._launch_dependents = launch_dependents
        # The kernel ahead of the first call may be the one that wrote the weights.
        self._is_first = True

    def __call__(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        tile: GemvTile | StreamTile | None = None,
    ) -> torch.Tensor:
        """residual: fp16, shaped like y and added last. out: where y goes, contiguous fp16; may be
        the residual itself. tile: forced.
        """
        y = out
        if y is None:
            y = torch.empty(x.shape[0], self.width, dtype=torch.float16, device=x.device)
        if x.shape[0]:
            self._launch(x, residual, y, tile or self._tile(x.shape[0]))
        return y

    def refuse_carry(self) -> str | None:
        """Why neither norm beside this layer can be part of it, else None. See carry.py."""
        if self.weights.out_features % WHOLE_WIDTH or self.weights.in_features % WHOLE_WIDTH:
            return f"{WHOLE_WIDTH} values do not divide its rows and columns"
        return None

    def normed(self, carry: Carry, *, tile: GemvTile | StreamTile | None = None) -> torch.Tensor:
        """y of the stream, normed as `carry` says. tile: forced."""
        rows = carry.x.shape[0]
        y = torch.empty(rows, self.width, dtype=torch.float16, device=carry.x.device)
        self._launch(carry.x, None, y, tile or self._normed_tile(rows), normed=carry)
        carry.taken()
        return y

    def add_to(self, carry: Carry, x: torch.Tensor, next_weight: torch.Tensor) -> None:
        """Add y to the stream, and leave the stream for the product behind the next norm, whose
        weight is next_weight f32[N].
        """
        tile = self._gemv_tile(x.shape[0])
        self._launch(x, None, carry.x, tile, carried=carry, next_weight=next_weight)

    def _tile(self, rows: int) -> GemvTile | StreamTile:
        stream = choose_stream(rows, self.weights, self.sm, self.multiprocessors)
        return stream or self._gemv_tile(rows)

    def _normed_tile(self, rows: int) -> GemvTile | StreamTile:
        stream = choose_normed_stream(rows, self.weights, self.sm, self.multiprocessors)
        return stream or self._gemv_tile(rows)

    def _gemv_tile(self, rows: int) -> GemvTile:
        weights = self.weights
        columns = weights.padded_columns
        return choose_tile(rows, weights.strips, columns, weights.bits, self.multiprocessors)

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        y: torch.Tensor,
        tile: GemvTile | StreamTile,
        normed: Carry | None = None,
        carried: Carry | None = None,
        next_weight: torch.Tensor | None = None,
    ) -> None:
        overlap = self._launch_dependents and not self._is_first
        self._is_first = False
        x = rows_for(x, self.weights)
        if isinstance(tile, StreamTile):
            assert carried is None, "nothing is added to the stream here"
            launch_stream(
                tile,
                self.weights,
                x,
                residual,
                y,
                multiprocessors=self.multiprocessors,
                gated=self.gated,
                launch_dependents=overlap,
                normed=normed,
            )
            return
        launch_gemv(
            tile,
            self.weights,
            x,
            residual,
            y,
            gated=self.gated,
            launch_dependents=overlap,
            normed=normed,
            carried=carried,
            next_weight=next_weight,
        )


class FewRows:
    """y in fp16, whatever the dtype of x."""

    name = "cuda.strip_few"

    def refuse(self, key: OpKey) -> str | None:
        if key.m > MOST_ROWS:
            return f"{key.m} rows of x, at most {MOST_ROWS} are worth it"
        return refuse_many_rows(key)

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        """Raises ValueError where an offset does not fit fp16 (strip.to_strips)."""
        assert not isinstance(weights, DenseLinear)
        return StripFew(to_strips(weights))

    def prepare_strips(
        self, strips: StripWeights, dtype: torch.dtype, *, gated: bool = False
    ) -> LinearFn:
        """The same for weights that others read as well."""
        return StripFew(strips, gated)


SHIPPED = (
    *(
        tile.variant(4, 128, offsets=False)
        for tile in (
            ALONE[4],
            ALONG_K[4],
            HALF_K[4],
            WIDE,
            WIDE_PAIRS[4],
            ALONG_K_16,
            ALONG_K_PAIRS_16[4],
            HALF_K_16[4],
            WIDE_PAIRS_16[4],
            WIDE_SHORT_16[4],
            ALONG_K_32,
            ALONG_K_PAIRS_32,
            HALF_K_PAIRS_32,
            EARLY_PAIRS_32,
            WIDE_32[4],
        )
    ),
    *(
        tile.variant(3, 128, offsets=False)
        for tile in (
            ALONE[3],
            ALONE_SHORT[3],
            ALONG_K[3],
            HALF_K[3],
            ALONG_K_PAIRS_16[3],
            HALF_K_16[3],
            WIDE_SHORT_16[3],
            WIDE_PAIRS[3],
            WAVE_PAIRS,
            WIDE_FOURS,
            WIDE_PAIRS_16[3],
            WIDE_32[3],
        )
    ),
    *(tile.variant(4, 32, offsets=True) for tile in (WIDE, WIDE_PAIRS_16[4])),
    *(
        tile.variant(4, 128, offsets=False, gated=True)
        for tile in (WIDE, WIDE_PAIRS[4], WIDE_SHORT_16[4], WIDE_32[4])
    ),
    *(
        tile.variant(4, 128, offsets=False, gated=gated, normed=True)
        for tile, gated in (
            (ALONG_K[4], False),
            (HALF_K[4], False),
            (ALONG_K_PAIRS_16[4], False),
            (WIDE_PAIRS[4], True),
            (WIDE_SHORT_16[4], True),
            (ALONG_K_PAIRS_32, False),
        )
    ),
    *(
        tile.variant(4, 128, offsets=False, carries=carries)
        for tile in (ALONE[4], ALONG_K[4], HALF_K[4], WIDE_PAIRS[4], ALONG_K_16, ALONG_K_32)
        for carries in (1, 2)
    ),
    *(
        stream_tile(COLUMNS * warps, rows).variant(bits, 128, offsets=False, gated=gated)
        for bits in (4, 3)
        for rows, warps in SHAPES
        for gated in (False, True)
    ),
    stream_tile(4096).variant(4, 128, offsets=True),
    stream_tile(2048).variant(3, 128, offsets=True, gated=True),
    *(
        stream_tile(columns, rows).variant(bits, 128, offsets=False, gated=True, normed=True)
        for bits in (4, 3)
        for rows, columns in ((8, 2048), (8, 3584), (8, 4096), (16, 2048), (16, 3584))
    ),
)
"""Every shape for W4 in symmetric groups of 128, most of those for up to 16 rows of W3, the largest
ones for groups of 32 with offsets, gate and up on wide shapes, those with norms where they are in
use. Other kinds of weights compile on first use. One of those is beyond the budget: 33 to 64 rows
of W3 in layers of middling width spill 108 bytes a thread on sm_86.
"""
