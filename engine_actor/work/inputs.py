"""The tensors of one forward pass, and how a plan becomes them.

Knows blocks and positions; knows no request, no sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine_actor.core.plan import DecodeSlot, PrefillChunk


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One ragged batch of B sequences and T tokens in all (T = sum of q_lens).

    ids i64[T]; positions i64[T]; slots i64[T] = block * block_tokens + offset, where the KV of each
    token is written; block_tables i32[B, max_blocks], right-padded with 0; logit_rows i64[R], the
    rows of T whose logits are wanted (default: the last row of each sequence).
    Host copies, so that the CPU path and the launch code never synchronise: q_lens (new tokens per
    sequence), kv_lens (keys visible to the last of them), block_lists (block ids per sequence).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_lists: tuple[tuple[int, ...], ...]
    block_tokens: int

    @property
    def n_tokens(self) -> int:
        """T, the rows of the hidden state."""
        return sum(self.q_lens)


def build_decode(
    slots: Sequence[DecodeSlot], block_tokens: int, device: torch.device
) -> BatchInputs:
    """One row per slot. Raises ValueError where a token is still in flight (pipeline depth 1)."""
    ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for slot in slots:
        if slot.token is None:
            raise ValueError(f"{slot.key}: token of position {slot.position} is still in flight")
        ids.append(slot.token)
        positions.append(slot.position)
        block, offset = divmod(slot.position, block_tokens)
        targets.append(slot.blocks[block] * block_tokens + offset)
    return _assemble(
        ids,
        positions,
        targets,
        list(range(len(ids))),
        q_lens=(1,) * len(ids),
        kv_lens=tuple(position + 1 for position in positions),
        block_lists=tuple(slot.blocks for slot in slots),
        block_tokens=block_tokens,
        device=device,
    )


def build_prefill(
    chunks: Sequence[PrefillChunk], block_tokens: int, device: torch.device
) -> BatchInputs:
    """end - start rows per chunk; logit_rows are the last rows of the chunks that sample."""
    ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    logit_rows: list[int] = []
    for chunk in chunks:
        if len(chunk.tokens) != chunk.end - chunk.start:
            raise ValueError(f"{chunk.key}: {len(chunk.tokens)} ids for {chunk.start}..{chunk.end}")
        ids.extend(chunk.tokens)
        positions.extend(range(chunk.start, chunk.end))
        targets.extend(_slots(chunk, block_tokens))
        if chunk.samples:
            logit_rows.append(len(ids) - 1)
    return _assemble(
        ids,
        positions,
        targets,
        logit_rows,
        q_lens=tuple(chunk.end - chunk.start for chunk in chunks),
        kv_lens=tuple(chunk.end for chunk in chunks),
        block_lists=tuple(chunk.blocks for chunk in chunks),
        block_tokens=block_tokens,
        device=device,
    )


def _slots(chunk: PrefillChunk, block_tokens: int) -> Iterator[int]:
    """KV slot of every position of the chunk, block by block: no division per token."""
    first, last = chunk.start // block_tokens, (chunk.end - 1) // block_tokens
    for index in range(first, last + 1):
        base = (chunk.blocks[index] - index) * block_tokens
        begin = max(chunk.start, index * block_tokens)
        stop = min(chunk.end, (index + 1) * block_tokens)
        yield from range(base + begin, base + stop)


def _assemble(
    ids: list[int],
    positions: list[int],
    targets: list[int],
    logit_rows: list[int],
    *,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    block_lists: tuple[tuple[int, ...], ...],
    block_tokens: int,
    device: torch.device,
) -> BatchInputs:
    """Two buffers, two copies to the device, whatever the batch: everything else is a view."""
    rows = len(ids)
    packed = torch.frombuffer(array("q", ids + positions + targets + logit_rows), dtype=torch.int64)
    width = max(map(len, block_lists))
    table = array("i")
    for blocks in block_lists:
        table.extend(blocks)
        table.frombytes(bytes(4 * (width - len(blocks))))
    tables = torch.frombuffer(table, dtype=torch.int32).view(len(block_lists), width)
    if device.type != "cpu":
        packed, tables = packed.to(device), tables.to(device)
    return BatchInputs(
        ids=packed[:rows],
        positions=packed[rows : 2 * rows],
        slots=packed[2 * rows : 3 * rows],
        block_tables=tables,
        logit_rows=packed[3 * rows :],
        q_lens=q_lens,
        kv_lens=kv_lens,
        block_lists=block_lists,
        block_tokens=block_tokens,
    )
