"""Few rows of x through many W3 and W4 strips on sm_90: a grid that stays while weights stream by.

Owns the shapes of a block, the grid and the launch of strip_stream.cu. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.linear.carry import Carry, norm_arguments
from kernels.linear.strip import STRIP_ROWS, StripWeights

SOURCE = CudaSource("linear/strip_stream.cu")
ENTRY = "strip_stream"
SM = 90
GROUP = 128
"""Of a scale. Sums of smaller groups of x do not fit the registers beside it."""
COLUMNS = 256
"""Of K, a warp's; half of it is in the tests."""
SHAPES = {8: (2, 6, 3), 16: (1, 4, 2)}
"""Warps along K: sets of them, depth, window, as timed at K = 2048 and 4096. A grid that stays was
no faster at 3584, with 14 warps, and slower at 1536.
"""
_SUMS_PITCH, _BUFFERS = 20, 3


@dataclass(frozen=True, slots=True)
class StreamTile:
    """A block's shape. rows: of x there is room for, 8. warps: that share K, `columns` each, 128 or
    256; sets: of so many warps, with strips of their own. depth: strips in shared memory, of which
    `window` at most are on their way. watched: for tools that watch every access to shared memory.
    """

    rows: int
    warps: int
    columns: int
    depth: int
    window: int
    sets: int = 1
    watched: bool = False

    @property
    def threads(self) -> int:
        """Of a block; a warp asks for weights."""
        return 32 * (self.warps * self.sets + 1)

    def shared_bytes(self, bits: int, group: int, offsets: bool) -> int:
        """Dynamic shared memory: strips, and sums of the warps."""
        columns = self.warps * self.columns
        scales = 2 * STRIP_ROWS * (columns // group)
        slot = STRIP_ROWS * columns * bits // 8 + scales * (1 + offsets)
        return self.depth * slot + self.sets * _BUFFERS * self.warps * self.rows * _SUMS_PITCH * 4

    def grid(self, rows: int, strips: int, multiprocessors: int) -> tuple[int, int, int]:
        """Blocks for so many rows of x and strips."""
        return min(strips, multiprocessors), -(-rows // self.rows), 1

    def variant(
        self, bits: int, group: int, offsets: bool, gated: bool = False, normed: bool = False
    ) -> Variant:
        """The compiled kernel for one kind of weights, with its budget."""
        defines = {
            "BITS": bits,
            "ROWS": self.rows,
            "WARPS": self.warps,
            "COLUMNS": self.columns,
            "SETS": self.sets,
            "DEPTH": self.depth,
            "WINDOW": self.window,
            "BUFFERS": _BUFFERS,
            "WATCHED": int(self.watched),
            "GROUP": group,
            "OFFSETS": int(offsets),
            "GATED": int(gated),
            "NORMED": int(normed),
        }
        shared = self.shared_bytes(bits, group, offsets)
        barriers = 16 * (self.depth + self.sets * _BUFFERS) + 4 * self.rows  # and the rows' norms
        return Variant(
            SOURCE,
            ENTRY,
            defines,
            max_registers=min(255, 65536 // self.threads // 8 * 8),
            max_shared_bytes=shared + -(-barriers // 128) * 128,
            threads=self.threads,
            shared_bytes=shared,
            first_sm=SM,
        )


def refuse_stream(group: int, columns: int) -> str | None:
    """Why there is no block for weights of so many padded columns, a scale for every `group` of
    them, else None.
    """
    if group != GROUP:
        return f"group {group} is not {GROUP}"
    warps, rest = divmod(columns, COLUMNS)
    if rest or warps not in SHAPES:
        return f"{columns} columns are not {COLUMNS} times one of {tuple(SHAPES)}"
    return None


def stream_tile(columns: int) -> StreamTile:
    """For so many padded columns, which refuse_stream() lets pass."""
    warps = columns // COLUMNS
    sets, depth, window = SHAPES[warps]
    return StreamTile(8, warps, COLUMNS, depth, window, sets)


@cache
def stream_kernel(
    tile: StreamTile, bits: int, group: int, offsets: bool, gated: bool, normed: bool
) -> Kernel:
    """One Kernel object a variant: it holds what was loaded."""
    return tile.variant(bits, group, offsets, gated, normed).kernel()


def launch_stream(
    tile: StreamTile,
    weights: StripWeights,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    *,
    multiprocessors: int,
    gated: bool,
    launch_dependents: bool,
    normed: Carry | None = None,
) -> None:
    """As strip_gemv.launch_gemv(), for weights whose padded columns are the tile's. normed: only
    where the tile is forced; StripFew.normed() says why.
    """
    offsets = weights.offsets is not None
    kernel = stream_kernel(tile, weights.bits, weights.group, offsets, gated, normed is not None)
    kernel.launch(
        tile.grid(x.shape[0], weights.strips, multiprocessors),
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
        weights.strips,
        *norm_arguments(normed),
        launch_dependents=launch_dependents,
    )
