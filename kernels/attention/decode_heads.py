"""Decoded rows from their projected heads to attention in one launch: decode_heads.cu.

The same as kernels.kv.cuda and CudaAttention.decode() one after the other, for a step whose plan is
made once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Protocol

import torch

from kernels.attention.cuda import (
    DTYPES,
    FEW_WARPS,
    HEAD_DIMS,
    WARPS,
    CudaPlan,
    split_of,
    tiles_of,
    units_of,
)
from kernels.attention.cuda import variant as attention_variant
from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.pack.int8_kv import Int8KV, stored
from kernels.spec.device import device_info

SOURCE = CudaSource("attention/decode_heads.cu")
ENTRY = "decode_heads"
CLUSTER_UNITS = 8
"""(Sequence, KV head) pairs of a step up to which the splits of a sequence meet in a cluster, on
sm_90 and newer: 3.5 us for 4.6 at 1 x 512 tokens, 12 us of a step of 36 layers. With 16 pairs that
is no gain; with 32 clusters wait for one another, 11.8 us for 7.3.
"""
MOST_IN_CLUSTER = 8
"""Blocks; more are not portable."""


class HeadNorms(Protocol):
    """As kernels.kv.op.HeadNorms."""

    @property
    def q_weight(self) -> torch.Tensor: ...

    @property
    def k_weight(self) -> torch.Tensor: ...

    @property
    def eps(self) -> float: ...


HeadsFn = Callable[[torch.Tensor, torch.Tensor | Int8KV, HeadNorms | None], torch.Tensor]
"""Projected heads [B, queries + 2 * kv, head_dim] of decoded rows and a layer's cache -> what
attention gives, [B, queries * head_dim]; keys and values are in the cache afterwards."""


def variant(
    head_dim: int, kv_bits: int, bf16: int, head_norm: int, block_tokens: int, warps: int
) -> Variant:
    """The compiled kernel for one kind of heads and cache, with its budget."""
    like = attention_variant(head_dim, kv_bits, bf16, block_tokens, warps)
    defines = {**like.defines, "HEAD_NORM": head_norm, "CLUSTER": 1}
    return replace(like, source=SOURCE, entry=ENTRY, defines=defines)


SHIPPED = tuple(
    variant(head_dim, kv_bits, bf16, head_norm, 16, warps)
    for head_dim in HEAD_DIMS
    for kv_bits in (16, 8)
    for bf16, head_norm in ((0, 0), (1, 1))
    for warps in sorted({FEW_WARPS, WARPS[kv_bits]})
)


@cache
def _kernel(
    head_dim: int, kv_bits: int, bf16: int, head_norm: int, block_tokens: int, warps: int
) -> Kernel:
    return variant(head_dim, kv_bits, bf16, head_norm, block_tokens, warps).kernel()


def load_decode_heads(
    head_dim: int, kv_bits: int, dtype: torch.dtype, block_tokens: int, has_norms: bool
) -> None:
    """As CudaAttention.load(), for models with or without norms of heads."""
    for warps in {FEW_WARPS, WARPS[kv_bits]}:
        bf16, head_norm = DTYPES[dtype], int(has_norms)
        _kernel(head_dim, kv_bits, bf16, head_norm, block_tokens, warps).load()


class DecodeHeads:
    """A HeadsFn for the decoded rows of one plan, which has no others.

    cos, sin f32[B, 1, head_dim], sin with the sign of its first half; the newest token of a row is
    the one at its length - 1. queries, kv_heads: of a row; query_scale goes on the queries.

    Of what a call reads, only the heads may come from the kernel just ahead of it in the stream:
    lengths, tables, angles and all older keys and values must be complete before that one is
    launched (decode_heads.cu).
    """

    def __init__(
        self,
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: CudaPlan,
        queries: int,
        kv_heads: int,
        query_scale: float,
    ) -> None:
        assert plan.decode is not None
        self._step = step = plan.decode
        self._angles = cos, sin
        self._block_tokens, self._window = plan.block_tokens, plan.window or 0
        self._queries, self._kv_heads, self._query_scale = queries, kv_heads, query_scale
        self._tiles = tiles_of(step.longest, plan.window)
        self._units = units_of(queries, kv_heads)
        self._multiprocessors = device_info(step.lengths.device).multiprocessors

    def __call__(
        self, heads: torch.Tensor, kv: torch.Tensor | Int8KV, norms: HeadNorms | None
    ) -> torch.Tensor:
        codes, scales, bits = stored(kv)
        step, dtype, head_dim = self._step, heads.dtype, heads.shape[2]
        count, units = step.lengths.shape[0], self._units
        split = split_of(self._tiles, units * count, self._multiprocessors, bits)
        splits = -(-self._tiles // split.tiles)
        partial = step.room(units, splits, head_dim)
        width = self._queries * head_dim
        out = torch.empty(heads.shape[0], width, dtype=dtype, device=heads.device)
        has_norms = int(norms is not None)
        kernel = _kernel(head_dim, bits, DTYPES[dtype], has_norms, self._block_tokens, split.warps)
        kernel.launch(
            (units, splits, count),
            (32 * split.warps, 1, 1),
            heads,
            *self._angles,
            None if norms is None else norms.q_weight,
            None if norms is None else norms.k_weight,
            codes,
            scales,
            step.tables,
            step.lengths,
            step.rows,
            out,
            partial,
            self._kv_heads,
            self._queries // self._kv_heads,
            step.tables.shape[1],
            min(split.tiles, FEW_WARPS),
            self._window,
            self._query_scale,
            0.0 if norms is None else norms.eps,
            launch_dependents=True,
            cluster=splits_in_cluster(kernel, 32 * split.warps, splits, units * count),
        )
        return out


class HoldsClusters(Protocol):
    """As kernels.jit.kernel.Kernel."""

    def clusters_at_once(self, threads: int, cluster: int) -> int: ...


def splits_in_cluster(kernel: HoldsClusters, threads: int, splits: int, units: int) -> int:
    """How many splits meet in a cluster: all of a unit or 1. units: (sequence, KV head) pairs."""
    if units > CLUSTER_UNITS or not 1 < splits <= MOST_IN_CLUSTER:
        return 1
    return splits if units <= kernel.clusters_at_once(threads, splits) else 1
