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
_SUMS_PITCH = 20


@dataclass(frozen=True, slots=True)
class StreamTile:
    """A block's shape. rows: of x there is room for, 8 to 32. warps: that share K, `columns` each,
    128 or 256; sets: of so many warps, with strips of their own. turns: strips of a set in shared
    memory; `window` of a block's at most are on their way. added: eights of rows that one warp
    adds up. registers: of a thread that multiplies and of another one, where they are not the
    same. watched: for tools that watch every access to shared memory.
    """

    rows: int
    warps: int
    columns: int
    turns: int
    window: int
    sets: int = 1
    added: int = 1
    registers: tuple[int, int] | None = None
    watched: bool = False

    @property
    def depth(self) -> int:
        """Strips in shared memory."""
        return self.turns * self.sets

    @property
    def threads(self) -> int:
        """Of a block; some warps of each set add up and one asks for weights."""
        adders = self.rows // 8 // self.added
        warps = self.sets * (self.warps + adders) + 1
        # Registers are handed out to four warps at a time.
        return 32 * (warps if self.registers is None else -(-warps // 4) * 4)

    def shared_bytes(self, bits: int, group: int, offsets: bool) -> int:
        """Dynamic shared memory: strips, and sums of the warps."""
        columns = self.warps * self.columns
        scales = 2 * STRIP_ROWS * (columns // group)
        slot = STRIP_ROWS * columns * bits // 8 + scales * (1 + offsets)
        return self.depth * (slot + self.warps * self.rows * _SUMS_PITCH * 4)

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
            "ADDED": self.added,
            "KEEPING": self.registers[0] if self.registers else 0,
            "OTHERS": self.registers[1] if self.registers else 0,
            "DEPTH": self.depth,
            "WINDOW": self.window,
            "WATCHED": int(self.watched),
            "GROUP": group,
            "OFFSETS": int(offsets),
            "GATED": int(gated),
            "NORMED": int(normed),
        }
        shared = self.shared_bytes(bits, group, offsets)
        barriers = 32 * self.depth + 4 * self.rows  # and the rows' norms
        return Variant(
            SOURCE,
            ENTRY,
            defines,
            max_registers=min(255, 65536 // self.threads // 8 * 8),
            max_shared_bytes=shared + -(-barriers // 128) * 128,
            threads=self.threads,
            shared_bytes=shared,
            first_sm=SM,
            # Of 32 rows, sums of x find no room while they are made; none of it is in the loop.
            spill_bytes=320 if self.rows == 32 else 16 if self.rows == 24 else 0,
        )


SHAPES = {
    (tile.rows, tile.warps): tile
    for tile in (
        StreamTile(8, 8, COLUMNS, turns=3, window=3, sets=2),
        StreamTile(8, 14, COLUMNS, turns=4, window=2),
        StreamTile(8, 16, COLUMNS, turns=4, window=2),
        StreamTile(16, 8, COLUMNS, turns=4, window=2),
        StreamTile(16, 14, COLUMNS, turns=3, window=2, added=2),
        StreamTile(24, 8, COLUMNS, turns=4, window=2, registers=(208, 64)),
        StreamTile(32, 8, COLUMNS, turns=4, window=2, added=2, registers=(232, 40)),
    )
}
"""By rows of x there is room for and warps along K, as timed at K = 2048, 3584 and 4096. At 1536
short blocks are faster; more rows of 3584 and 4096 columns do not fit the registers.
"""


def refuse_stream(group: int, columns: int, rows: int = 8) -> str | None:
    """Why there is no block with room for so many rows of x, a multiple of 8, for weights of so
    many padded columns, a scale for every `group` of them; else None.
    """
    if group != GROUP:
        return f"group {group} is not {GROUP}"
    warps, rest = divmod(columns, COLUMNS)
    if rest or (rows, warps) not in SHAPES:
        of_rows = tuple(warps for room, warps in SHAPES if room == rows)
        return f"{columns} columns are not {COLUMNS} times one of {of_rows} for {rows} rows"
    return None


def stream_tile(columns: int, rows: int = 8) -> StreamTile:
    """For so many padded columns and rows of x, which refuse_stream() lets pass."""
    return SHAPES[rows, columns // COLUMNS]


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
    """As strip_gemv.launch_gemv(), for weights whose padded columns are the tile's. normed:
    strip_choice.choose_normed_stream() says where it pays.
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
