"""Random paged caches whose unused slots are NaN, and the fp32 answers that do not see them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.attention.op import AttentionPlan, Segment, attention_reference
from kernels.pack.int8_kv import Int8KV, quantise_kv

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """A ragged batch: q_lens[i] rows at the end of kv_lens[i] keys in block_lists[i]."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_lists: tuple[tuple[int, ...], ...]
    n_blocks: int

    @property
    def rows(self) -> int:
        return sum(self.q_lens)


def ragged(q_lens: Sequence[int], kv_lens: Sequence[int], seed: int = 0) -> Case:
    """Scattered blocks, some of them nobody's."""
    draw = random.Random(seed)
    counts = [-(-kv_len // BLOCK_TOKENS) for kv_len in kv_lens]
    free = list(range(sum(counts) + 7))
    draw.shuffle(free)
    lists = tuple(tuple(free.pop() for _ in range(count)) for count in counts)
    return Case(tuple(q_lens), tuple(kv_lens), lists, sum(counts) + 7)


def poisoned_cache(case: Case, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Random where a sequence has a key, NaN elsewhere: in free blocks and behind a last key."""
    shape = (case.n_blocks, BLOCK_TOKENS, 2, kv_heads, head_dim)
    kv = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
    for kv_len, blocks in zip(case.kv_lens, case.block_lists, strict=True):
        slots = [blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(kv_len)]
        fresh = torch.randn(kv_len, *shape[2:], device="cuda")
        kv.view(-1, *shape[2:])[torch.tensor(slots, device="cuda")] = fresh.to(dtype)
    return kv


def as_int8(kv: torch.Tensor) -> Int8KV:
    """The same cache in codes; where it held NaN the scale is NaN and the codes are anything."""
    codes, scales = quantise_kv(kv.nan_to_num(0.0))
    empty = kv.isnan().any(-1)
    scales[empty] = torch.nan
    codes[empty] = 77
    return Int8KV(codes, scales.transpose(-1, -2).contiguous())


def queries(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Scaled, so that scores have a spread of about two."""
    return (torch.randn(rows, heads, head_dim, device="cuda") * 2 / head_dim**0.5).to(dtype)


def expected(
    q: torch.Tensor, kv: torch.Tensor | Int8KV, case: Case, window: int | None
) -> torch.Tensor:
    """attention_reference for the case, [rows, heads * head_dim] fp32; sequences by themselves."""
    segments, row = [], 0
    for q_len, kv_len, blocks in zip(case.q_lens, case.kv_lens, case.block_lists, strict=True):
        segments.append(Segment(row, q_len, kv_len, 0, None, blocks, None, None))
        row += q_len
    plan = AttentionPlan(tuple(segments), (), tuple(segments), BLOCK_TOKENS, window)
    kv = Int8KV(kv.codes.cpu(), kv.scales.cpu()) if isinstance(kv, Int8KV) else kv.cpu()
    return attention_reference(q.cpu(), kv, plan).flatten(1)
