"""Attention through torch's scaled_dot_product_attention, one call per sequence, any device."""

from __future__ import annotations

import torch

from kernels.attention.op import AttentionPlan, Segment, segment_kv

_sdpa = torch.nn.functional.scaled_dot_product_attention


def attention_sdpa(
    q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """q [T, heads, head_dim] in the dtype of kv -> [T, heads * head_dim] in the same dtype."""
    parts = [
        _one_row(q, kv, segment, scale) if segment.q_len == 1 else _rows(q, kv, segment, scale)
        for segment in plan.segments
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _one_row(q: torch.Tensor, kv: torch.Tensor, segment: Segment, scale: float) -> torch.Tensor:
    """[1, heads * head_dim]. The query heads that share a KV head become the rows of one small
    product, so no key is repeated.
    """
    kv_heads, head_dim = kv.shape[3], kv.shape[4]
    keys, values = _keys_values(kv, segment)
    row = q[segment.first_row].view(1, kv_heads, -1, head_dim)
    return _sdpa(row, keys, values, scale=scale).reshape(1, -1)


def _rows(q: torch.Tensor, kv: torch.Tensor, segment: Segment, scale: float) -> torch.Tensor:
    """[q_len, heads * head_dim]"""
    keys, values = _keys_values(kv, segment)
    rows = q[segment.first_row : segment.first_row + segment.q_len]
    out = _sdpa(
        rows.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=segment.mask,
        is_causal=segment.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).reshape(segment.q_len, -1)


def _keys_values(kv: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, kv_heads, seen, head_dim] of a segment."""
    start = 0
    if segment.start is None:
        kv = segment_kv(kv, segment)
    else:
        start = segment.start
    # One strided view each: slicing and transposing would be six calls a layer.
    kv_heads, head_dim = kv.shape[-2], kv.shape[-1]
    width = kv_heads * head_dim
    token = 2 * width
    seen = segment.kv_len - segment.skip
    size, stride = (1, kv_heads, seen, head_dim), (token * seen, head_dim, token, 1)
    first = kv.storage_offset() + start * token
    return kv.as_strided(size, stride, first), kv.as_strided(size, stride, first + width)
