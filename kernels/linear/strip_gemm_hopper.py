"""Many rows of x through W3 and W4 strips on Hopper's tensor cores (sm_90a only): wgmma and TMA.

Plans, splits and the end of a tile are those of strip_gemm.py. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.jit.kernel import CudaSource, Variant
from kernels.jit.tensor_map import tensor_map
from kernels.linear.gemm_plan import TileCost
from kernels.linear.many_rows import ManyRows, refuse_many_rows
from kernels.linear.strip import StripWeights, to_strips
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.op import OpKey

SOURCE = CudaSource("linear/strip_gemm_hopper.cu")
ENTRY = "strip_gemm_hopper"
SM = 90
REGISTERS = {1: (40, 216), 2: (24, 240), 3: (32, 160)}
"""Of a loading and of a computing thread, by computing warpgroups: 65,536 in all."""


@dataclass(frozen=True, slots=True)
class HopperTile:
    """A block's shape. consumers: warpgroups of 64 out-features. row_tiles: eights of rows of x, 4,
    8, 16, 24 or 32. stages: steps of 64 columns of x in shared memory.
    """

    consumers: int
    row_tiles: int
    stages: int
    blocks: int = 1

    overlaps = True

    @property
    def threads(self) -> int:
        """Of a block; one warpgroup only loads."""
        return 128 * (self.consumers + 1)

    @property
    def n(self) -> int:
        """Out-features of a block."""
        return 64 * self.consumers

    @property
    def m(self) -> int:
        """Rows of x of a block."""
        return 8 * self.row_tiles

    def chunk_steps(self, bits: int) -> int:
        """Weights are read 256 columns at a time, whatever their width."""
        return 4

    def operand(self, x: torch.Tensor) -> bytes:
        """A map of x in boxes of the tile's rows."""
        return tensor_map(x, self.m)

    def variant(self, bits: int, group: int, offsets: bool, silu: bool = False) -> Variant:
        """The compiled kernel for one kind of weights, with its budget."""
        loader, consumer = REGISTERS[self.consumers]
        defines = {
            "BITS": bits,
            "GROUP": group,
            "OFFSETS": int(offsets),
            "SILU": int(silu),
            "CONSUMERS": self.consumers,
            "ROW_TILES": self.row_tiles,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
            "LOADER_REGISTERS": loader,
            "CONSUMER_REGISTERS": consumer,
        }
        return Variant(
            SOURCE,
            ENTRY,
            defines,
            max_registers=65536 // (self.threads * self.blocks) // 8 * 8,  # before they move over
            max_shared_bytes=227 * 1024,
            threads=self.threads,
            spill_bytes=32,  # a unit's bookkeeping, at three computing warpgroups
            shared_bytes=self.stages * self.m * 128 + 8192 * self.consumers + 1024,
            first_sm=SM,
        )


WIDE = HopperTile(consumers=2, row_tiles=32, stages=6)
SQUARE = HopperTile(consumers=2, row_tiles=16, stages=8)
THREE = HopperTile(consumers=3, row_tiles=16, stages=8)
THIN = HopperTile(consumers=3, row_tiles=8, stages=12)
SLIM = HopperTile(consumers=3, row_tiles=4, stages=12)
PAIR = HopperTile(consumers=1, row_tiles=16, stages=5, blocks=2)
SMALL = HopperTile(consumers=1, row_tiles=8, stages=8, blocks=2)
LEAST = HopperTile(consumers=1, row_tiles=4, stages=8, blocks=2)
TILES = {
    WIDE: TileCost(WIDE.n, WIDE.m, WIDE.blocks, step=0.67, lone=0.67, fixed=2.3),
    SQUARE: TileCost(SQUARE.n, SQUARE.m, SQUARE.blocks, step=0.42, lone=0.42, fixed=1.5),
    THREE: TileCost(THREE.n, THREE.m, THREE.blocks, step=0.58, lone=0.58, fixed=1.5),
    THIN: TileCost(THIN.n, THIN.m, THIN.blocks, step=0.39, lone=0.39, fixed=2.3),
    SLIM: TileCost(SLIM.n, SLIM.m, SLIM.blocks, step=0.31, lone=0.31, fixed=2.4),
    PAIR: TileCost(PAIR.n, PAIR.m, PAIR.blocks, step=0.52, lone=0.3, fixed=2.0),
    SMALL: TileCost(SMALL.n, SMALL.m, SMALL.blocks, step=0.36, lone=0.29, fixed=1.9),
    LEAST: TileCost(LEAST.n, LEAST.m, LEAST.blocks, step=0.275, lone=0.27, fixed=1.5),
}


class GemmHopper:
    """y in fp16, whatever the dtype of x."""

    name = "cuda.gemm_hopper"

    def refuse(self, key: OpKey) -> str | None:
        if key.device == "cuda" and key.sm != SM:
            return f"made of sm_{SM}a's own instructions, this is sm_{key.sm}"
        return refuse_many_rows(key)

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        assert not isinstance(weights, DenseLinear)
        return self.prepare_strips(to_strips(weights), dtype)

    def prepare_strips(
        self, strips: StripWeights, dtype: torch.dtype, *, gated: bool = False
    ) -> ManyRows[HopperTile]:
        """As prepare(), of weights that other backends read too."""
        return ManyRows(strips, TILES, gated)


SHIPPED = tuple(
    tile.variant(bits, group, offsets, silu)
    for tile in TILES
    for bits, group, offsets, silu in (
        (4, 128, False, False),
        (4, 128, False, True),
        (3, 32, True, False),
    )
)
