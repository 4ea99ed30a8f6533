"""A layer of strips prepared for many rows: plan, scratch, launch; the same for Ampere and Hopper.

The kernels differ in their tiles and in how they are given x; everything else is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch

from kernels.jit.counters import COUNTERS, counters_on, queue_key
from kernels.jit.kernel import Kernel, Variant
from kernels.linear.gemm_plan import Plan, TileCost, plan_units, share_of_card
from kernels.linear.strip import StripWeights, refuse_strips
from kernels.spec.device import device_info
from kernels.spec.op import OpKey

BAND = 16
"""Row tiles whose x stays in L2 while all weights pass."""
OVERLAPPING_ROWS = 256
"""Up to so many rows a call may begin while the kernel ahead of it runs. From 512 on it gains
nothing, and blocks that wait ahead of time take every multiprocessor that falls free before another
stream gets one: a decode step beside 512 or 2,048 rows waited for the whole prefill.
"""


class ManyRowsTile(Protocol):
    """What a family of kernels says of one of its tiles. Hashable: it names a compiled variant.

    overlaps: on sm_90 and newer a call may load weights before the kernel ahead of it has ended.
    """

    @property
    def n(self) -> int: ...
    @property
    def m(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def overlaps(self) -> bool: ...
    def __hash__(self) -> int: ...
    def chunk_steps(self, bits: int) -> int: ...
    def operand(self, x: torch.Tensor) -> Any: ...
    def variant(self, bits: int, group: int, offsets: bool, silu: bool = False) -> Variant: ...


AnyTile = TypeVar("AnyTile", bound=ManyRowsTile)


class ManyRows(Generic[AnyTile]):
    """Call it with x [M, K]; y is fp16 [M, N].

    silu: W is a fused gate and up, re-laid by strip.interleave_halves(); y is silu(gate) * up,
    [M, N / 2]. One layer may run on several streams, and in several graphs, at a time.
    """

    def __init__(
        self, weights: StripWeights, tiles: Mapping[AnyTile, TileCost], silu: bool = False
    ) -> None:
        self.weights = weights
        self.tiles = tiles
        self.silu = silu
        self.group = 0 if weights.scales.shape[1] == 1 else weights.group
        device = weights.words.device
        self.multiprocessors = device_info(device).multiprocessors
        self._counters = counters_on(device)
        # The kernel ahead of the first call may be the one that wrote the weights.
        self._is_first = True
        self._plans: dict[int, Plan[AnyTile]] = {}

    def __call__(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        max_ctas: int | None = None,
        plan: Plan[AnyTile] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """residual: fp16, shaped like y and added last. max_ctas: at most so many multiprocessors
        are taken, None for what share_of_card() allows. plan: forced, for benches and tests. out:
        y, fp16 and contiguous, where it is there already.
        """
        weights = self.weights
        x = rows_for(x, weights)
        m, width = x.shape[0], weights.out_features // (2 if self.silu else 1)
        y = torch.empty(m, width, dtype=torch.float16, device=x.device) if out is None else out
        if m == 0:
            return y
        plan = plan or self.plan_for(m)
        partials = arrivals = None
        if plan.partials:
            partials = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
            arrivals = self._counters.of(queue_key())
        tile = plan.tile
        ctas = share_of_card(self.multiprocessors) if max_ctas is None else max_ctas
        has_card = ctas >= self.multiprocessors
        if has_card:
            ctas *= tile.blocks
        # Blocks that wait for their turn would take what a limit is to leave to others.
        may_overlap = tile.overlaps and has_card and m <= OVERLAPPING_ROWS
        is_first, self._is_first = self._is_first, False
        kernel = kernel_of(tile, weights.bits, self.group, weights.offsets is not None, self.silu)
        kernel.launch(
            (min(plan.units, ctas), 1, 1),
            (tile.threads, 1, 1),
            tile.operand(x),
            weights.words,
            weights.scales,
            weights.offsets,
            weights.bias,
            residual,
            y,
            partials,
            arrivals,
            m,
            weights.out_features,
            x.shape[1],
            weights.padded_columns // 64,
            weights.scales.shape[1],
            plan.whole,
            plan.splits,
            BAND,
            launch_dependents=may_overlap and not is_first,
        )
        return y

    def into(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """See weights.write_into."""
        if y.dtype == torch.float16:
            self(x, out=y)
        else:
            y.copy_(self(x))

    def plan_for(
        self, m: int, tile: AnyTile | None = None, splits: int | None = None
    ) -> Plan[AnyTile]:
        """The cheapest plan for m rows; of one tile and number of splits where they are given."""
        is_open = tile is None and splits is None
        if is_open and m in self._plans:
            return self._plans[m]
        tiles = self.tiles if tile is None else {tile: self.tiles.get(tile, _plain_cost(tile))}
        plan = plan_units(
            tiles,
            m,
            self.weights.strips * 16,
            steps=-(-self.weights.in_features // 64),
            chunk_steps={each: each.chunk_steps(self.weights.bits) for each in tiles},
            multiprocessors=self.multiprocessors,
            most_tiles_shared=COUNTERS,
            splits=splits,
        )
        if is_open:
            self._plans[m] = plan
        return plan


def _plain_cost(tile: ManyRowsTile) -> TileCost:
    return TileCost(tile.n, tile.m, tile.blocks, step=1.0, lone=1.0, fixed=4.0)


@cache
def kernel_of(tile: ManyRowsTile, bits: int, group: int, offsets: bool, silu: bool) -> Kernel:
    """One Kernel object for each variant: it holds what was loaded."""
    return tile.variant(bits, group, offsets, silu).kernel()


def rows_for(x: torch.Tensor, weights: StripWeights) -> torch.Tensor:
    """x as the kernels read it: fp16, columns in stored order, rows of a multiple of 16 bytes."""
    if weights.perm is not None:
        x = x.index_select(-1, weights.perm)
    x = x.to(torch.float16)
    if x.shape[1] % 8:
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8))
    return x.contiguous()


def refuse_many_rows(key: OpKey) -> str | None:
    """What no kernel of this kind does."""
    if key.exact:
        return "fp16 activations"
    if key.device != "cuda":
        return "runs on a GPU only"
    if key.dtype != "float16":
        return f"multiplies fp16 activations, not {key.dtype}"
    return refuse_strips(key.bits, key.group, key.k)
