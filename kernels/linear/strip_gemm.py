"""Many rows of x through W3 and W4 strips on Ampere's tensor cores (sm_80 and everything newer).

Which tile a call gets is a pure function of its shape and the card, so that a result never depends
on how many blocks run. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.jit.kernel import CudaSource, Variant
from kernels.linear.gemm_plan import TileCost
from kernels.linear.many_rows import ManyRows, refuse_many_rows
from kernels.linear.strip import StripWeights, to_strips
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.spec.op import OpKey

SOURCE = CudaSource("linear/strip_gemm.cu")
ENTRY = "strip_gemm"


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's shape. warps_n, warps_m: warps along out-features and along rows. strips,
    row_tiles: sixteens of out-features and eights of rows of one warp. stages: steps of 64 columns
    in shared memory. blocks: how many share a multiprocessor, where its shared memory allows.
    """

    warps_n: int
    warps_m: int
    strips: int
    row_tiles: int
    stages: int
    blocks: int

    entry = ENTRY
    overlaps = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps_n * self.warps_m

    @property
    def n(self) -> int:
        """Out-features of a block."""
        return 16 * self.warps_n * self.strips

    @property
    def m(self) -> int:
        """Rows of x of a block."""
        return 8 * self.warps_m * self.row_tiles

    def chunk_steps(self, bits: int) -> int:
        """Steps of K that lie together in the strips and cannot be cut apart."""
        return 4 if bits == 3 else 1

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """How the kernel is given x."""
        return x

    def shared_bytes(self, bits: int, group: int, offsets: bool) -> int:
        """Dynamic shared memory, as the source lays it out. group: 0 for the whole row."""
        strips = self.n // 16
        groups = 2 if group == 32 else 1
        chunks = 2 * 1536 if bits == 3 else self.stages * 512
        scales = 32 * groups * (2 if offsets else 1)
        return self.stages * (self.m * 128 + strips * scales) + strips * chunks

    def variant(self, bits: int, group: int, offsets: bool, silu: bool = False) -> Variant:
        """The compiled kernel for one kind of weights, with its budget."""
        defines = {
            "BITS": bits,
            "GROUP": group,
            "OFFSETS": int(offsets),
            "SILU": int(silu),
            "WARPS_N": self.warps_n,
            "WARPS_M": self.warps_m,
            "STRIPS": self.strips,
            "ROW_TILES": self.row_tiles,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
        }
        return Variant(
            SOURCE,
            ENTRY,
            defines,
            max_registers=min(255, 65536 // (self.threads * self.blocks) // 8 * 8),
            max_shared_bytes=99 * 1024,
            threads=self.threads,
            shared_bytes=self.shared_bytes(bits, group, offsets),
            # All registers that so many blocks leave are taken; a few words of the loader's
            # bookkeeping, touched once a step of some 250 products, may lie in local memory.
            spill_bytes=64,
        )


TALL = Tile(warps_n=4, warps_m=1, strips=2, row_tiles=16, stages=4, blocks=2)
LOW = Tile(warps_n=4, warps_m=1, strips=2, row_tiles=8, stages=3, blocks=3)
TILES = {
    TALL: TileCost(TALL.n, TALL.m, TALL.blocks, step=1.2, lone=0.85, fixed=7.0),
    LOW: TileCost(LOW.n, LOW.m, LOW.blocks, step=1.2, lone=0.5, fixed=4.5),
}


class GemmAmpere:
    """y in fp16, whatever the dtype of x."""

    name = "cuda.gemm_ampere"

    def refuse(self, key: OpKey) -> str | None:
        return refuse_many_rows(key)

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        assert not isinstance(weights, DenseLinear)
        return self.prepare_strips(to_strips(weights), dtype)

    def prepare_strips(
        self, strips: StripWeights, dtype: torch.dtype, *, gated: bool = False
    ) -> ManyRows[Tile]:
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
