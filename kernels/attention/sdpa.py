"""Attention through torch's scaled_dot_product_attention, one call per sequence, any device."""

from __future__ import annotations

import torch

from kernels.attention.op import AttentionPlan, Segment, segment_kv

_sdpa = torch.nn.functional.scaled_dot_product_attention


def attention_sdpa(
    q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """q [T, heads, head_dim] in the dtype of kv -> [T, heads * head_dim] in the same dtype."""
    parts = [_segment(q, segment_kv(kv, segment), segment, scale) for segment in plan.segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _segment(q: torch.Tensor, kv: torch.Tensor, segment: Segment, scale: float) -> torch.Tensor:
    """[q_len, heads * head_dim] of one sequence; kv [keys, 2, kv_heads, head_dim]."""
    keys, values = kv.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    rows = q[segment.first_row : segment.first_row + segment.q_len]
    heads, head_dim = rows.shape[1], rows.shape[2]
    if segment.q_len == 1:
        # The query heads that share a KV head become rows of one small product: no repeated keys.
        grouped = rows.view(1, kv.shape[2], -1, head_dim)
        return _sdpa(grouped, keys, values, scale=scale).reshape(1, heads * head_dim)
    out = _sdpa(
        rows.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=segment.mask,
        is_causal=segment.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).reshape(segment.q_len, heads * head_dim)
