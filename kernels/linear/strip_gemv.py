"""Few rows of x through W3 and W4 strips: the decode GEMV.

Owns the shapes of a block, the grid and the launch of strip_gemv.cu. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.linear.carry import Carry, norm_arguments
from kernels.linear.strip import GROUPS, STEP_COLUMNS, STRIP_ROWS, StripWeights

SOURCE = CudaSource("linear/strip_gemv.cu")
ENTRY = "strip_gemv"


@dataclass(frozen=True, slots=True)
class GemvTile:
    """A block's shape. rows: of x there is room for, a multiple of 8. warps take turns along K,
    unroll steps at a time; strips: of a block, side by side, sharing x. prefetch: the next turn is
    asked for before this one is used. resident: blocks that the compiler leaves registers for.
    signed: codes are made signed one by one, which takes fewer registers, and less where a block
    has few strips for its rows.
    """

    rows: int
    warps: int
    unroll: int
    strips: int = 1
    prefetch: bool = False
    resident: int = 1
    signed: bool = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the warps' sums."""
        return self.warps * self.rows * (STRIP_ROWS * self.strips + 1) * 4

    def grid(self, rows: int, strips: int) -> tuple[int, int, int]:
        """Blocks for so many rows of x and strips."""
        return -(-rows // self.rows), -(-strips // self.strips), 1

    def variant(
        self,
        bits: int,
        group: int,
        offsets: bool,
        gated: bool = False,
        ragged: bool = False,
        normed: bool = False,
        carries: int = 0,
    ) -> Variant:
        """The compiled kernel for one kind of weights, with its budget. group: as group_define().
        ragged: K is not whole steps. normed, carries: see launch_gemv(), carries 1 or 2 by stream.
        """
        sums = self.rows * self.strips
        defines = {
            "BITS": bits,
            "ROWS": self.rows,
            "WARPS": self.warps,
            "UNROLL": self.unroll,
            "STRIPS": self.strips,
            "PREFETCH": int(self.prefetch),
            "GROUP": group,
            "OFFSETS": int(offsets),
            "GATED": int(gated),
            "RAGGED": int(ragged),
            "NORMED": int(normed),
            "CARRIES": carries,
            "RESIDENT": self.resident,
            "SIGNED": int(self.signed),
        }
        return Variant(
            SOURCE,
            ENTRY,
            defines,
            max_registers=min(255, 65536 // (self.threads * self.resident) // 8 * 8),
            max_shared_bytes=self.shared_bytes + (4 * self.rows if normed else 0),
            threads=self.threads,
            shared_bytes=self.shared_bytes,
            # More blocks that spill a little are faster than fewer that do not.
            spill_bytes=128 if sums >= 128 else 16 if sums >= 64 else 0,
        )


def group_define(weights: StripWeights) -> int:
    """The group where it is smaller than a step or equal to one of W4, else 0: whole steps."""
    return weights.group if weights.group in GROUPS else 0


def steps_of_group(weights: StripWeights) -> int:
    """How many steps share a scale, where a group is whole steps; 1 otherwise."""
    return max(1, weights.group // STEP_COLUMNS[weights.bits])


@cache
def gemv_kernel(
    tile: GemvTile,
    bits: int,
    group: int,
    offsets: bool,
    gated: bool,
    ragged: bool,
    normed: bool,
    carries: int,
) -> Kernel:
    """One Kernel object a variant: it holds what was loaded."""
    return tile.variant(bits, group, offsets, gated, ragged, normed, carries).kernel()


def launch_gemv(
    tile: GemvTile,
    weights: StripWeights,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    *,
    gated: bool,
    launch_dependents: bool,
    normed: Carry | None = None,
    carried: Carry | None = None,
    next_weight: torch.Tensor | None = None,
) -> None:
    """y = x @ W.T + bias + residual, or silu(gate) * up. x [M, K] fp16, columns in
    stored order, K a multiple of 8. y and residual fp16 [M, N] (gated: [M, N / 2]).

    normed: x is its x, and is normed. carried: y is its x; to its stream is added, and next_weight
    f32[N] is the weight of the norm that comes next.
    """
    group, offsets = group_define(weights), weights.offsets is not None
    ragged = x.shape[1] != weights.padded_columns
    carries = 0 if carried is None else 2 if carried.stream.dtype == torch.float32 else 1
    is_normed = normed is not None
    kernel = gemv_kernel(tile, weights.bits, group, offsets, gated, ragged, is_normed, carries)
    kernel.launch(
        tile.grid(x.shape[0], weights.strips),
        (tile.threads, 1, 1),
        x,
        weights.words,
        weights.scales,
        weights.offsets,
        weights.bias,
        residual,
        y,
        x.shape[0],
        weights.out_features,
        x.shape[1],
        weights.steps,
        weights.scales.shape[1],
        steps_of_group(weights),
        *norm_arguments(normed),
        *(None,) * 4
        if carried is None
        else (carried.stream, next_weight, carried.lifts[0], carried.squares),
        launch_dependents=launch_dependents,
    )
