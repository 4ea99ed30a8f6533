"""Rows of a prompt over everything before them and themselves, through torch's flash attention.

The keys are gathered block by block once a layer, a copy as long as the sequence; the causal rule
is the kernel's own, so no [queries, keys] matrix is ever made. With a sliding window the rows go in
slices, each over the keys that it can see, under a mask that is bounded by slice and window.
"""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right

from kernels.attention.op import Segment
from kernels.pack.int8_kv import Int8KV

WINDOW_ROWS = 128
"""Rows that share a mask of so many by window + so many."""
_sdpa = torch.nn.functional.scaled_dot_product_attention


def attend_prompt(
    q: torch.Tensor,
    kv: torch.Tensor | Int8KV,
    segment: Segment,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Write the segment's rows of out [T, heads * head_dim]; q [T, heads, head_dim], scaled."""
    keys, values = _gathered(kv, segment, q.dtype)
    rows = slice(segment.first_row, segment.first_row + segment.q_len)
    queries = q[rows].transpose(0, 1).unsqueeze(0)
    into = out[rows].view(segment.q_len, q.shape[1], q.shape[2])
    if window is None or segment.kv_len <= window:
        bias = causal_lower_right(segment.q_len, segment.kv_len)
        got = _sdpa(queries, keys, values, attn_mask=bias, scale=1.0, enable_gqa=True)
        into.copy_(got[0].transpose(0, 1))
        return
    before = segment.kv_len - segment.q_len
    for first in range(0, segment.q_len, WINDOW_ROWS):
        last = min(first + WINDOW_ROWS, segment.q_len)
        low, high = max(0, before + first + 1 - window), before + last
        position = torch.arange(before + first, high, device=q.device).unsqueeze(1)
        key = torch.arange(low, high, device=q.device)
        seen = (key <= position) & (key > position - window)
        part = slice(low - segment.skip, high - segment.skip)
        got = _sdpa(
            queries[:, :, first:last],
            keys[:, :, part],
            values[:, :, part],
            attn_mask=seen,
            scale=1.0,
            enable_gqa=True,
        )
        into[first:last] = got[0].transpose(0, 1)


def _gathered(
    kv: torch.Tensor | Int8KV, segment: Segment, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, kv_heads, kv_len - skip, head_dim] of the positions from skip on."""
    assert segment.index is not None
    if isinstance(kv, Int8KV):
        blocks = kv.blocks(segment.index, dtype)
    else:
        blocks = kv.index_select(0, segment.index)
    seen = blocks.flatten(0, 1)[segment.skip : segment.kv_len]
    keys, values = seen.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    return keys, values
