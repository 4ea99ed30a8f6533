"""How a plan becomes the tensors of one forward pass.

Knows blocks and positions; knows no request, no sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from engine_actor.core.plan import DecodeSlot, PrefillChunk
from engine_actor.core.sequence import BlockTable
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.work.staging import Staging, host_numbers
from engine_actor.work.token_buffer import TokenBuffer

_IN_FLIGHT = -1
"""Stands for an id that an open step is still making."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What carries a batch's ints to the device: `staging`, or copies that the host waits for.
    `tokens`: where the ids are that the host does not know yet; None where no step is planned
    ahead."""

    staging: Staging | None = None
    tokens: TokenBuffer | None = None


PLAIN = Feed()


def build_decode(
    slots: Sequence[DecodeSlot], block_tokens: int, device: torch.device, feed: Feed = PLAIN
) -> BatchInputs:
    """One row per slot. Raises ValueError where a token is in flight and the feed has no buffer."""
    return _assemble(_decode_rows(slots, block_tokens), block_tokens, device, feed, slots)


def build_prefill(
    chunks: Sequence[PrefillChunk], block_tokens: int, device: torch.device, feed: Feed = PLAIN
) -> BatchInputs:
    """end - start rows per chunk; logit_rows are the last rows of the chunks that sample."""
    return _assemble(_prefill_rows(chunks, block_tokens), block_tokens, device, feed)


def build_mixed(
    slots: Sequence[DecodeSlot],
    chunks: Sequence[PrefillChunk],
    block_tokens: int,
    device: torch.device,
    feed: Feed = PLAIN,
) -> BatchInputs:
    """The rows of build_decode, then those of build_prefill."""
    rows = _decode_rows(slots, block_tokens)
    rows.extend(_prefill_rows(chunks, block_tokens))
    return _assemble(rows, block_tokens, device, feed, slots)


@dataclass(slots=True)
class _Rows:
    """The ints of a batch, as BatchInputs names them; targets: its slots. Those of each row are
    i64 from the start: joining lists of a long chunk's ints would take milliseconds.
    """

    ids: array[int] = field(default_factory=partial(array, "q"))
    positions: array[int] = field(default_factory=partial(array, "q"))
    targets: array[int] = field(default_factory=partial(array, "q"))
    logit_rows: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    q_lens: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    block_lists: list[tuple[int, ...]] = field(default_factory=list)

    def extend(self, other: _Rows) -> None:
        """Put another batch's sequences behind these."""
        n_rows = len(self.ids)
        self.ids += other.ids
        self.positions += other.positions
        self.targets += other.targets
        self.logit_rows += [n_rows + row for row in other.logit_rows]
        self.wanted += [len(self.q_lens) + index for index in other.wanted]
        self.q_lens += other.q_lens
        self.kv_lens += other.kv_lens
        self.block_lists += other.block_lists


def _decode_rows(slots: Sequence[DecodeSlot], block_tokens: int) -> _Rows:
    positions = [slot.position for slot in slots]
    block_lists = [slot.blocks for slot in slots]
    targets = [
        blocks[position // block_tokens] * block_tokens + position % block_tokens
        for position, blocks in zip(positions, block_lists, strict=True)
    ]
    return _Rows(
        ids=array("q", [_IN_FLIGHT if slot.token is None else slot.token for slot in slots]),
        positions=array("q", positions),
        targets=array("q", targets),
        logit_rows=list(range(len(slots))),
        wanted=list(range(len(slots))),
        q_lens=[1] * len(slots),
        kv_lens=[position + 1 for position in positions],
        block_lists=block_lists,
    )


def _prefill_rows(chunks: Sequence[PrefillChunk], block_tokens: int) -> _Rows:
    rows = _Rows(
        q_lens=[chunk.end - chunk.start for chunk in chunks],
        kv_lens=[chunk.end for chunk in chunks],
        block_lists=[chunk.blocks for chunk in chunks],
    )
    for index, chunk in enumerate(chunks):
        if len(chunk.tokens) != chunk.end - chunk.start:
            raise ValueError(f"{chunk.key}: {len(chunk.tokens)} ids for {chunk.start}..{chunk.end}")
        # Twice as fast as to make i64 of them at once.
        ids = np.frombuffer(array("I", chunk.tokens), dtype=np.uintc)
        rows.ids.frombytes(ids.astype(np.int64).tobytes())
        rows.positions.frombytes(np.arange(chunk.start, chunk.end, dtype=np.int64).tobytes())
        rows.targets.frombytes(_slots(chunk, block_tokens).tobytes())
        if chunk.samples:
            rows.logit_rows.append(len(rows.ids) - 1)
            rows.wanted.append(index)
    return rows


def _slots(chunk: PrefillChunk, block_tokens: int) -> NDArray[np.int64]:
    """KV slot of every position of the chunk."""
    first = chunk.start // block_tokens
    blocks = np.array(chunk.blocks[first : -(-chunk.end // block_tokens)], dtype=np.int64)
    slots = (blocks[:, np.newaxis] * block_tokens + np.arange(block_tokens)).ravel()
    before = first * block_tokens
    return slots[chunk.start - before : chunk.end - before]


def _assemble(
    batch: _Rows,
    block_tokens: int,
    device: torch.device,
    feed: Feed,
    slots: Sequence[DecodeSlot] = (),
) -> BatchInputs:
    """Two buffers, whatever the batch: everything else is a view. `slots`: of its first rows."""
    rows = len(batch.ids)
    wide = batch.ids + batch.positions + batch.targets
    wide.extend(batch.logit_rows)
    in_flight = batch.ids[: len(slots)].count(_IN_FLIGHT)
    if in_flight:
        wide.extend([slot.slot for slot in slots])
    width = max(map(len, batch.block_lists))
    packed, tables = (feed.staging or host_numbers)(wide, _tables(batch.block_lists, width))
    if packed.device.type != device.type:
        packed, tables = packed.to(device), tables.to(device)
    ids, end = packed[:rows], 3 * rows + len(batch.logit_rows)
    if in_flight:
        ids = _with_tokens(ids, packed[end:], feed, slots, in_flight)
    return BatchInputs(
        ids=ids,
        positions=packed[rows : 2 * rows],
        slots=packed[2 * rows : 3 * rows],
        block_tables=tables.view(-1, width),
        logit_rows=packed[3 * rows : end],
        q_lens=tuple(batch.q_lens),
        kv_lens=tuple(batch.kv_lens),
        block_lists=tuple(batch.block_lists),
        block_tokens=block_tokens,
        wanted=tuple(batch.wanted),
    )


def _tables(block_lists: Sequence[tuple[int, ...]], width: int) -> bytearray:
    """i32[B, width], right-padded with 0."""
    row_bytes = 4 * width
    return bytearray().join(
        (blocks.packed if isinstance(blocks, BlockTable) else array("i", blocks).tobytes()).ljust(
            row_bytes, b"\0"
        )
        for blocks in block_lists
    )


def _with_tokens(
    ids: torch.Tensor,
    places: torch.Tensor,
    feed: Feed,
    slots: Sequence[DecodeSlot],
    in_flight: int,
) -> torch.Tensor:
    """The ids with those from the buffer in it; places: the slots of the first rows."""
    if feed.tokens is None:
        late = next(slot for slot in slots if slot.token is None)
        raise ValueError(f"{late.key}: token of position {late.position} is still in flight")
    feed.tokens.reach(max([slot.slot for slot in slots]))
    return feed.tokens.read(ids, places, in_flight == len(slots))
