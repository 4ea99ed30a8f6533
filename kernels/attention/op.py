"""ops.attention: grouped-query attention of ragged rows over a paged KV cache.

The queries come scaled by 1 / sqrt(head_dim).

What is the same for every layer of one forward (which slots a sequence sees, its mask) is planned
once; the layers share the plan. Knows no request and no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.pack.int8_kv import Int8KV
from kernels.spec.op import OpSpec
from kernels.spec.page_locked import page_locked


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of the batch: rows first_row..first_row + q_len - 1 are its positions
    kv_len - q_len..kv_len - 1, and its keys are positions 0..kv_len - 1.

    skip: leading keys no row can see (sliding window). start: slot of key `skip` where the keys
    from there on lie in consecutive slots, else None; then index, i64 on the device, holds the ids
    of `blocks`. blocks: ids covering all keys.
    mask: bool [q_len, kv_len - skip], True where a row sees a key; None where the plain causal
    rule says it all.
    """

    first_row: int
    q_len: int
    kv_len: int
    skip: int
    start: int | None
    blocks: tuple[int, ...]
    index: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Decoded rows of similar length that are worth one padded call.

    rows: i64[B] their rows. blocks: i64[B * W], W blocks each, padded with block 0. mask: fp32
    [B, 1, 1, W * block_tokens], 0 where the row sees the key, -inf where not.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything but the tensors of one layer. window: keys a row sees, itself included.

    segments: all sequences in order. groups and alone: the same, each in exactly one of both; a
    backend that goes sequence by sequence ignores them.
    """

    segments: tuple[Segment, ...]
    groups: tuple[RowGroup, ...]
    alone: tuple[Segment, ...]
    block_tokens: int
    window: int | None


GROUP_KEYS = 512
"""Longest sequence that is gathered into a group: beyond it the copy costs more than a call."""
GROUP_PADDING = 2
"""The longest of a group is at most so many times its shortest."""


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor's copy there. A GPU's comes from page-locked memory: from any other the host
    would have to wait for all that the stream was given before, and nothing could run ahead.
    """
    if device.type != "cuda":
        return values.to(device)
    return page_locked(device).send(values)


def spans(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_lists: Sequence[Sequence[int]],
    block_tokens: int,
    window: int | None,
) -> Iterator[tuple[int, int, int, int, tuple[int, ...]]]:
    """(first row, rows, keys, keys that no row sees, blocks in use) of every sequence, for the
    fields of a Segment."""
    row = 0
    for q_len, kv_len, blocks in zip(q_lens, kv_lens, block_lists, strict=True):
        skip = 0 if window is None else max(0, kv_len - q_len + 1 - window)
        yield row, q_len, kv_len, skip, tuple(blocks[: -(-kv_len // block_tokens)])
        row += q_len


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
    for row, q_len, kv_len, skip, used in spans(q_lens, kv_lens, block_lists, block_tokens, window):
        run = all(block == used[0] + i for i, block in enumerate(used))
        start = used[0] * block_tokens + skip if run else None
        mask = _mask(q_len, kv_len, skip, window, device)
        index = None if run else on_device(torch.tensor(used, dtype=torch.int64), device)
        segments.append(Segment(row, q_len, kv_len, skip, start, used, index, mask))
    groups, alone = _grouped(segments, block_tokens, device)
    return AttentionPlan(tuple(segments), groups, alone, block_tokens, window)


def _grouped(
    segments: list[Segment], block_tokens: int, device: torch.device
) -> tuple[tuple[RowGroup, ...], tuple[Segment, ...]]:
    """Decoded rows by length, in runs whose padding stays bounded; what is left goes alone."""
    alone = [s for s in segments if s.q_len > 1 or s.kv_len > GROUP_KEYS]
    short = sorted(
        (s for s in segments if s.q_len == 1 and s.kv_len <= GROUP_KEYS), key=lambda s: s.kv_len
    )
    groups = []
    while short:
        limit = max(short[0].kv_len, block_tokens) * GROUP_PADDING
        members = [s for s in short if s.kv_len <= limit]
        short = short[len(members) :]
        if len(members) == 1:
            alone.append(members[0])
        else:
            groups.append(_row_group(members, block_tokens, device))
    return tuple(groups), tuple(alone)


def _row_group(members: list[Segment], block_tokens: int, device: torch.device) -> RowGroup:
    width = max(len(s.blocks) for s in members)
    blocks = [block for s in members for block in (*s.blocks, *[0] * (width - len(s.blocks)))]
    keys = torch.arange(width * block_tokens)
    last = torch.tensor([s.kv_len for s in members]).unsqueeze(1)
    first = torch.tensor([s.skip for s in members]).unsqueeze(1)
    mask = torch.zeros(len(members), width * block_tokens)
    mask.masked_fill_((keys >= last) | (keys < first), -torch.inf)
    return RowGroup(
        on_device(torch.tensor([s.first_row for s in members]), device),
        on_device(torch.tensor(blocks), device),
        on_device(mask.view(len(members), 1, 1, -1), device),
    )


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
    assert segment.index is not None
    gathered = kv.index_select(0, segment.index).flatten(0, 1)
    return gathered[segment.skip : segment.kv_len]


def attention_reference(
    q: torch.Tensor, kv: torch.Tensor | Int8KV, plan: AttentionPlan
) -> torch.Tensor:
    """fp32, row by row, head by head. q [T, heads, head_dim] -> [T, heads, head_dim]."""
    if isinstance(kv, Int8KV):
        kv = kv.values()
    heads, group = q.shape[1], q.shape[1] // kv.shape[3]
    out = torch.empty_like(q, dtype=torch.float32)
    for segment in plan.segments:
        slots = [
            segment.blocks[p // plan.block_tokens] * plan.block_tokens + p % plan.block_tokens
            for p in range(segment.kv_len)
        ]
        keys, values = kv.flatten(0, 1)[slots].float().unbind(1)
        for i in range(segment.q_len):
            row, position = segment.first_row + i, segment.kv_len - segment.q_len + i
            low = 0 if plan.window is None else max(0, position + 1 - plan.window)
            for head in range(heads):
                seen = slice(low, position + 1)
                scores = keys[seen, head // group] @ q[row, head].float()
                out[row, head] = scores.softmax(0) @ values[seen, head // group]
    return out


ATTENTION = OpSpec(
    name="attention",
    axes=(("m", "query rows"), ("n", "tokens of a block"), ("k", "values of a head")),
    reference=attention_reference,
    tolerance=(("float32", 2e-6), ("bfloat16", 2e-2), ("float16", 3e-3)),
)
"""Of its key, `bits` is 8 for an INT8 cache, else 0."""
