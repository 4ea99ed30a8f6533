"""Batch-invariant attention: every query row is its own call, whose shape and strides depend on the
row's position only, so its bits do not depend on its neighbours, its chunk or its blocks.
"""

from __future__ import annotations

import torch

from kernels.attention.op import AttentionPlan, Segment, segment_kv

ALIGNMENT = 64
"""Bytes to which torch aligns an allocation; a GEMM may take another path for less."""

_sdpa = torch.nn.functional.scaled_dot_product_attention


def attention_exact(q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """q fp32 [T, heads, head_dim] -> fp32 [T, heads * head_dim]."""
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    for segment in plan.segments:
        _rows(q, _aligned(kv, segment), segment, plan.window, out)
    return out


def _aligned(kv: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The segment's keys and values at an address that is aligned like a fresh allocation."""
    seen = segment_kv(kv, segment)
    token_bytes = seen.stride(0) * seen.element_size()
    return seen if token_bytes % ALIGNMENT == 0 else seen.clone()


def _rows(
    q: torch.Tensor,
    kv: torch.Tensor,
    segment: Segment,
    window: int | None,
    out: torch.Tensor,
) -> None:
    keys, values = kv.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    grouped = q.view(q.shape[0], 1, kv.shape[2], -1, q.shape[2])
    for i in range(segment.q_len):
        row, position = segment.first_row + i, segment.kv_len - segment.q_len + i
        low = 0 if window is None else max(0, position + 1 - window) - segment.skip
        high = position + 1 - segment.skip
        seen = slice(low, high)
        part = _sdpa(grouped[row], keys[:, :, seen], values[:, :, seen], scale=1.0)
        out[row] = part.reshape(-1)
