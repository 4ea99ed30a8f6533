"""Attention through torch's scaled_dot_product_attention and bmm, any device.

Three ways, chosen by what a batch looks like: prompts one call each; a single decoded row through
two small products (a third of the fused call's cost for so few rows); several decoded rows of
similar length gathered and padded into one call, since for short sequences a call costs more than
the copy.
"""

from __future__ import annotations

import torch

from kernels.attention.op import AttentionPlan, RowGroup, Segment, segment_kv

_sdpa = torch.nn.functional.scaled_dot_product_attention


def attention_sdpa(q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """q [T, heads, head_dim] in the dtype of kv -> [T, heads * head_dim] in the same dtype."""
    if len(plan.segments) == 1:
        return _segment(q, kv, plan.segments[0])
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    for group in plan.groups:
        _group(q, kv, group, out)
    for segment in plan.alone:
        end = segment.first_row + segment.q_len
        out[segment.first_row : end] = _segment(q, kv, segment)
    return out


def _segment(q: torch.Tensor, kv: torch.Tensor, segment: Segment) -> torch.Tensor:
    return _one_row(q, kv, segment) if segment.q_len == 1 else _rows(q, kv, segment)


def _one_row(q: torch.Tensor, kv: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[1, heads * head_dim]. The query heads that share a KV head are the rows of one product."""
    kv, first = _source(kv, segment)
    kv_heads, head_dim = kv.shape[-2], kv.shape[-1]
    width = kv_heads * head_dim
    seen = segment.kv_len - segment.skip
    keys = kv.as_strided((kv_heads, head_dim, seen), (head_dim, 1, 2 * width), first)
    values = kv.as_strided((kv_heads, seen, head_dim), (head_dim, 2 * width, 1), first + width)
    row = q[segment.first_row].view(kv_heads, -1, head_dim)
    return torch.bmm(torch.bmm(row, keys).softmax(-1), values).view(1, -1)


def _rows(q: torch.Tensor, kv: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[q_len, heads * head_dim]"""
    kv, first = _source(kv, segment)
    kv_heads, head_dim = kv.shape[-2], kv.shape[-1]
    width = kv_heads * head_dim
    seen = segment.kv_len - segment.skip
    size = (1, kv_heads, seen, head_dim)
    stride = (2 * width * seen, head_dim, 2 * width, 1)
    rows = q[segment.first_row : segment.first_row + segment.q_len]
    out = _sdpa(
        rows.transpose(0, 1).unsqueeze(0),
        kv.as_strided(size, stride, first),
        kv.as_strided(size, stride, first + width),
        attn_mask=segment.mask,
        is_causal=segment.mask is None,
        scale=1.0,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).reshape(segment.q_len, -1)


def _group(q: torch.Tensor, kv: torch.Tensor, group: RowGroup, out: torch.Tensor) -> None:
    """Rows of several sequences over their gathered blocks, the short ones padded and masked."""
    kv_heads, head_dim = kv.shape[3], kv.shape[4]
    count = group.rows.shape[0]
    gathered = kv.index_select(0, group.blocks).view(count, -1, 2, kv_heads, head_dim)
    keys, values = gathered.permute(2, 0, 3, 1, 4).unbind(0)
    rows = q.index_select(0, group.rows).view(count, kv_heads, -1, head_dim)
    attended = _sdpa(rows, keys, values, attn_mask=group.mask.to(q.dtype), scale=1.0)
    out.index_copy_(0, group.rows, attended.reshape(count, -1))


def _source(kv: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, int]:
    """The tensor to make strided views of, and where its first key is: the cache itself where the
    segment's slots are consecutive. One view each for keys and values beats slicing six times.
    """
    if segment.start is None:
        seen = segment_kv(kv, segment)
        return seen, int(seen.storage_offset())
    return kv, int(kv.storage_offset()) + segment.start * kv.stride(1)
