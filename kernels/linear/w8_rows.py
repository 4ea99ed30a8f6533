"""Some tens of rows times 8-bit weights on CUDA: the INT8 head of a batch, w8_rows.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.linear.w8_gemv import refuse_all_but_int8
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.op import OpKey

SOURCE = CudaSource("linear/w8_rows.cu")
MOST_ROWS = 256
"""Blocks of other rows of x read the weights once more; beyond this a dense copy is no worse."""
CHUNK = 64
STAGES = 4
DTYPES = {torch.float16: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a block: 8 * batches rows of x; warps side by side with `strips` times 16 rows of W."""

    batches: int
    warps: int = 4
    strips: int = 2

    @property
    def rows(self) -> int:
        """Of W."""
        return 16 * self.strips * self.warps

    @property
    def shared_bytes(self) -> int:
        """The ring of stages of x, or the sums that are stored from the same place."""
        x_rows = 8 * self.batches
        return max(STAGES * x_rows * (2 * CHUNK + 16), 4 * x_rows * (self.rows + 4))

    def variant(self, bf16: int, wide: int) -> Variant:
        """The compiled kernel. wide: y in fp32."""
        defines = {
            "BF16": bf16,
            "BATCHES": self.batches,
            "WARPS": self.warps,
            "STRIPS": self.strips,
            "WIDE": wide,
        }
        return Variant(
            SOURCE,
            "w8_rows",
            defines,
            max_registers=min(255, 65536 // (64 * self.warps)),
            max_shared_bytes=self.shared_bytes,
            threads=32 * self.warps,
            shared_bytes=self.shared_bytes,
        )


TILES = (Tile(4), Tile(8))
"""By rows of x; the last one takes its rows at a time of any number."""
SHIPPED = tuple(tile.variant(bf16, wide) for tile in TILES for bf16 in (0, 1) for wide in (0, 1))


@cache
def _kernel(tile: Tile, bf16: int, wide: int) -> Kernel:
    return tile.variant(bf16, wide).kernel()


class W8Rows:
    """y in the activations' dtype."""

    name = "cuda.w8_rows"

    def refuse(self, key: OpKey) -> str | None:
        """None where it can; else why not."""
        if reason := refuse_all_but_int8(key, "fp16 products"):
            return reason
        if key.perm:
            return "columns are permuted"
        if key.m > MOST_ROWS:
            return f"{key.m} rows of x, at most {MOST_ROWS} are worth it"
        if key.group != key.k or key.k % CHUNK:
            return f"K = {key.k} in groups of {key.group}: one scale a row, whole steps of {CHUNK}"
        return None

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        assert isinstance(weights, PackedLinear)
        return W8RowsLinear(weights, dtype)


class W8RowsLinear:
    """A prepared layer. Call it with x [M, K]."""

    def __init__(self, weights: PackedLinear, dtype: torch.dtype) -> None:
        self.rows = weights.out_features
        self._dtype = dtype
        self._codes = weights.qweight.contiguous()
        self._scales = weights.scales.contiguous()
        self._bias = None if weights.bias is None else weights.bias.to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.rows, dtype=self._dtype, device=x.device)
        self.into(x, y)
        return y

    def into(self, x: torch.Tensor, y: torch.Tensor, tile: Tile | None = None) -> None:
        """Write y [M, N], contiguous, fp32 or the layer's dtype. tile: forced."""
        m, columns = x.shape
        if m == 0:
            return
        if tile is None:
            tile = next((each for each in TILES if m <= 8 * each.batches), TILES[-1])
        _kernel(tile, DTYPES[self._dtype], int(y.dtype == torch.float32)).launch(
            (-(-m // (8 * tile.batches)), -(-self.rows // tile.rows), 1),
            (32 * tile.warps, 1, 1),
            x.to(self._dtype).contiguous(),
            self._codes,
            self._scales,
            self._bias,
            y,
            m,
            self.rows,
            columns,
            launch_dependents=True,
        )
