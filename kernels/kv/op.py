"""ops.write_kv: put the new keys and values of one layer into the paged cache.

Cache layout of a layer: kv [n_blocks, block_tokens, 2, kv_heads, head_dim] (keys, then values, of a
token side by side), so one row copy stores both. A slot is block * block_tokens + offset. An INT8
cache has codes in that place and scales beside them (kernels.pack.int8_kv).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.pack.int8_kv import Int8KV, quantise_kv


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """RMS norms of each query and key head before it is rotated: weights f32[head_dim]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


StoreFn = Callable[[torch.Tensor, torch.Tensor | Int8KV, HeadNorms | None], torch.Tensor]
"""Projected heads [T, queries + 2 * kv, head_dim] and a layer's cache -> rotated and scaled queries
[T, queries, head_dim]; keys and values are in the cache afterwards."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where T new tokens go. first: the slot of token 0 where the T slots are consecutive (then
    one slice is copied), else None. slots: i64[T].
    """

    first: int | None
    slots: torch.Tensor


def plan_write(slots: torch.Tensor, host_slots: Sequence[int]) -> WritePlan:
    """slots i64[T] on the device and the same on the host."""
    first = host_slots[0]
    run = all(slot == first + i for i, slot in enumerate(host_slots))
    return WritePlan(first if run else None, slots)


def write_kv(kv: torch.Tensor | Int8KV, new: torch.Tensor, plan: WritePlan) -> None:
    """kv as above; new [T, 2 * kv_heads, head_dim], keys first, of any float dtype."""
    if isinstance(kv, Int8KV):
        codes, scales = quantise_kv(new)
        pairs = scales.view(-1, 2, scales.shape[1] // 2).transpose(1, 2).contiguous()
        kv.codes.flatten(2, 3).flatten(0, 1).index_copy_(0, plan.slots, codes)
        kv.scales.flatten(0, 1).index_copy_(0, plan.slots, pairs)
        return
    if plan.first is None:
        flat = kv.view(-1, kv.shape[2] * kv.shape[3], kv.shape[4])
        flat.index_copy_(0, plan.slots, new.to(kv.dtype))
        return
    heads, head_dim = new.shape[1], new.shape[2]
    token = heads * head_dim
    first = kv.storage_offset() + plan.first * token
    kv.as_strided(new.shape, (token, head_dim, 1), first).copy_(new)


def write_kv_reference(kv: torch.Tensor | Int8KV, new: torch.Tensor, slots: Sequence[int]) -> None:
    """Token by token, straight from the layout."""
    if isinstance(kv, Int8KV):
        codes, scales = quantise_kv(new)
        write_kv_reference(kv.codes, codes, slots)
        by_kind = kv.scales.transpose(-1, -2).unsqueeze(-1)
        write_kv_reference(by_kind, scales.unsqueeze(-1), slots)
        return
    heads = kv.shape[3]
    for row, slot in enumerate(slots):
        block, offset = divmod(slot, kv.shape[1])
        kv[block, offset, 0] = new[row, :heads]
        kv[block, offset, 1] = new[row, heads:]
