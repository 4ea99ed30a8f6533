"""9 to 64 rows of x through W3 and W4 strips: decode of a full batch.

Owns the shapes of a block, the shares of K and the launch of strip_batch.cu. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.linear.strip import STEP_COLUMNS, STRIP_ROWS, StripWeights
from kernels.linear.strip_gemv import group_define, step_bytes, steps_of_group

SOURCE = CudaSource("linear/strip_batch.cu")
ENTRY = "strip_batch"
MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class BatchTile:
    """A block's shape. rows: of x there is room for, a multiple of 8. row_warps x strips: strips
    of a block. k_warps: groups of warps that take neighbouring steps of K. stages: rounds in
    shared memory. resident: blocks that fit a multiprocessor.
    """

    rows: int
    row_warps: int
    strips: int
    k_warps: int = 1
    stages: int = 4
    resident: int = 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.row_warps * self.k_warps

    @property
    def block_strips(self) -> int:
        """Strips of a block."""
        return self.row_warps * self.strips

    def shared_bytes(self, bits: int, group: int, offsets: bool) -> int:
        """Dynamic shared memory, as the source lays it out: rings, later sums in their place."""
        x = self.k_warps * self.rows * STEP_COLUMNS[bits] * 2
        weights = self.row_warps * self.k_warps * step_bytes(bits, group, offsets, self.strips)
        sums = self.k_warps * self.rows * (self.block_strips * STRIP_ROWS + 4) * 4
        return max(self.stages * (x + weights), sums)

    def variant(self, bits: int, group: int, offsets: bool, gated: bool = False) -> Variant:
        """The compiled kernel for one kind of weights, with its budget."""
        defines = {
            "BITS": bits,
            "ROWS": self.rows,
            "ROW_WARPS": self.row_warps,
            "STRIPS": self.strips,
            "K_WARPS": self.k_warps,
            "STAGES": self.stages,
            "GROUP": group,
            "OFFSETS": int(offsets),
            "GATED": int(gated),
            "RESIDENT": self.resident,
        }
        return Variant(
            SOURCE,
            ENTRY,
            defines,
            max_registers=min(255, 65536 // (self.threads * self.resident) // 8 * 8),
            max_shared_bytes=99 * 1024,
            threads=self.threads,
            shared_bytes=self.shared_bytes(bits, group, offsets),
        )


@cache
def batch_kernel(tile: BatchTile, bits: int, group: int, offsets: bool, gated: bool) -> Kernel:
    """One Kernel object a variant: it holds what was loaded."""
    return tile.variant(bits, group, offsets, gated).kernel()


def launch_batch(
    tile: BatchTile,
    splits: int,
    weights: StripWeights,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    gated: bool,
    launch_dependents: bool,
) -> None:
    """As launch_gemv(), M <= tile.rows. splits: shares of K, at most the steps. arrivals: i32, a
    zero for every tile, left zero again.
    """
    group, offsets = group_define(weights), weights.offsets is not None
    tiles = -(-weights.strips // tile.block_strips)
    partials = None
    if splits > 1:
        room = tiles * splits * tile.rows * tile.block_strips * STRIP_ROWS
        partials = torch.empty(room, dtype=torch.float32, device=x.device)
    batch_kernel(tile, weights.bits, group, offsets, gated).launch(
        (tiles, splits, 1),
        (tile.threads, 1, 1),
        x,
        weights.words,
        weights.scales,
        weights.offsets,
        weights.bias,
        residual,
        y,
        partials,
        arrivals,
        x.shape[0],
        weights.out_features,
        x.shape[1],
        weights.steps,
        weights.scales.shape[1],
        steps_of_group(weights),
        launch_dependents=launch_dependents,
    )
