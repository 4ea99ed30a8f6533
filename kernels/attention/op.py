"""ops.attention: grouped-query attention of ragged rows over a paged KV cache.

What is the same for every layer of one forward (which slots a sequence sees, its mask) is planned
once; the layers share the plan. Knows no request and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of the batch: rows first_row..first_row + q_len - 1 are its positions
    kv_len - q_len..kv_len - 1, and its keys are positions 0..kv_len - 1.

    skip: leading keys no row can see (sliding window). start: slot of key `skip` where the keys
    from there on lie in consecutive slots, else None. blocks: i64 block ids covering all keys.
    mask: bool [q_len, kv_len - skip], True where a row sees a key; None where the plain causal
    rule says it all.
    """

    first_row: int
    q_len: int
    kv_len: int
    skip: int
    start: int | None
    blocks: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything but the tensors of one layer. window: keys a row sees, itself included."""

    segments: tuple[Segment, ...]
    block_tokens: int
    window: int | None


def plan_attention(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_lists: Sequence[Sequence[int]],
    block_tokens: int,
    device: torch.device,
    window: int | None = None,
) -> AttentionPlan:
    """One segment per sequence; block_lists[i] covers kv_lens[i] positions."""
    segments = []
    row = 0
    for q_len, kv_len, blocks in zip(q_lens, kv_lens, block_lists, strict=True):
        used = list(blocks[: -(-kv_len // block_tokens)])
        skip = 0 if window is None else max(0, kv_len - q_len + 1 - window)
        run = all(block == used[0] + i for i, block in enumerate(used))
        segments.append(
            Segment(
                row,
                q_len,
                kv_len,
                skip,
                used[0] * block_tokens + skip if run else None,
                torch.tensor(used, dtype=torch.int64, device=device),
                _mask(q_len, kv_len, skip, window, device),
            )
        )
        row += q_len
    return AttentionPlan(tuple(segments), block_tokens, window)


def _mask(
    q_len: int, kv_len: int, skip: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    if q_len == 1 or (q_len == kv_len and (window is None or kv_len <= window)):
        return None
    rows = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1)
    keys = torch.arange(skip, kv_len, device=device)
    seen = keys <= rows
    return seen if window is None else seen & (keys > rows - window)


def segment_kv(kv: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The keys and values a segment sees: [kv_len - skip, 2, kv_heads, head_dim]. A view where its
    slots are consecutive, else a gathered copy.
    """
    if segment.start is not None:
        flat = kv.view(-1, *kv.shape[2:])
        return flat[segment.start : segment.start + segment.kv_len - segment.skip]
    gathered = kv.index_select(0, segment.blocks).flatten(0, 1)
    return gathered[segment.skip : segment.kv_len]


def attention_reference(
    q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """fp32, row by row, head by head. q [T, heads, head_dim] -> [T, heads, head_dim]."""
    heads, group = q.shape[1], q.shape[1] // kv.shape[3]
    out = torch.empty_like(q, dtype=torch.float32)
    for segment in plan.segments:
        slots = [
            int(segment.blocks[p // plan.block_tokens]) * plan.block_tokens + p % plan.block_tokens
            for p in range(segment.kv_len)
        ]
        keys, values = kv.flatten(0, 1)[slots].float().unbind(1)
        for i in range(segment.q_len):
            row, position = segment.first_row + i, segment.kv_len - segment.q_len + i
            low = 0 if plan.window is None else max(0, position + 1 - plan.window)
            for head in range(heads):
                seen = slice(low, position + 1)
                scores = keys[seen, head // group] @ q[row, head].float() * scale
                out[row, head] = scores.softmax(0) @ values[seen, head // group]
    return out
