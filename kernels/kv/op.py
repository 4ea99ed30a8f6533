"""ops.write_kv: put the new keys and values of one layer into the paged cache.

Cache layout of a layer: kv [n_blocks, block_tokens, 2, kv_heads, head_dim] (keys, then values, of a
token side by side), so one row copy stores both. A slot is block * block_tokens + offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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


def write_kv(kv: torch.Tensor, new: torch.Tensor, plan: WritePlan) -> None:
    """kv as above; new [T, 2 * kv_heads, head_dim], keys first, of any float dtype."""
    if plan.first is None:
        flat = kv.view(-1, kv.shape[2] * kv.shape[3], kv.shape[4])
        flat.index_copy_(0, plan.slots, new.to(kv.dtype))
        return
    heads, head_dim = new.shape[1], new.shape[2]
    token = heads * head_dim
    first = kv.storage_offset() + plan.first * token
    kv.as_strided(new.shape, (token, head_dim, 1), first).copy_(new)


def write_kv_reference(kv: torch.Tensor, new: torch.Tensor, slots: Sequence[int]) -> None:
    """Token by token, straight from the layout."""
    heads = kv.shape[3]
    for row, slot in enumerate(slots):
        block, offset = divmod(slot, kv.shape[1])
        kv[block, offset, 0] = new[row, :heads]
        kv[block, offset, 1] = new[row, heads:]
