"""A batch of prompts put where a captured graph reads it: fixed tensors for a fixed number of rows,
keys and sequences.

One kernel on CUDA (stage_prompts.cu); torch elsewhere, which is also what the kernel is tested
against.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import ClassVar

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant

SOURCE = CudaSource("kv/stage_prompts.cu")
ENTRY = "stage_prompts"
THREADS = 128
SEQUENCES = 8
"""Prompts that a graph has room for."""
VARIANT = Variant(SOURCE, ENTRY, {"SEQUENCES": SEQUENCES}, max_registers=48, threads=THREADS)
SHIPPED = (VARIANT,)
_PROMPTS = struct.Struct(f"{2 * SEQUENCES + 1}i")


@cache
def _kernel() -> Kernel:
    return VARIANT.kernel()


@dataclass(frozen=True, slots=True, eq=False)
class StagedPrompts:
    """R rows, K keys and SEQUENCES prompts at fixed addresses. ids and slots i64[R], slots -1 for
    padding; cos and sin f32[R, 1, head_dim]; key_slots i32[K], the prompts' keys one behind the
    other. q_starts and k_starts i32[SEQUENCES + 2]: of each prompt's rows and keys, then of the
    padding rows, which have no keys, then the ends. last_rows i64[SEQUENCES], lengths
    i32[SEQUENCES] and tables i32[SEQUENCES, width]: of each prompt, 0 where there is none.
    """

    SEQUENCES: ClassVar[int] = SEQUENCES

    ids: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    key_slots: torch.Tensor
    q_starts: torch.Tensor
    k_starts: torch.Tensor
    last_rows: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def empty(
        cls, rows: int, keys: int, block_tokens: int, head_dim: int, device: torch.device
    ) -> StagedPrompts:
        """All of it padding."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        made = cls(
            zeros(rows, dtype=torch.int64),
            zeros(rows, dtype=torch.int64),
            zeros(rows, 1, head_dim, dtype=torch.float32),
            zeros(rows, 1, head_dim, dtype=torch.float32),
            zeros(keys),
            zeros(SEQUENCES + 2),
            zeros(SEQUENCES + 2),
            zeros(SEQUENCES, dtype=torch.int64),
            zeros(SEQUENCES),
            zeros(SEQUENCES, -(-keys // block_tokens)),
        )
        made.clear()
        return made

    def clear(self) -> None:
        """Make all of it padding."""
        self.slots.fill_(-1)
        for tensor in (self.q_starts, self.k_starts, self.lengths, self.last_rows, self.key_slots):
            tensor.zero_()
        self.q_starts[-1:] = len(self.ids)

    def first(self, rows: int, keys: int, block_tokens: int) -> StagedPrompts:
        """The same memory for fewer rows and keys."""
        width = -(-keys // block_tokens)
        return StagedPrompts(
            self.ids[:rows],
            self.slots[:rows],
            self.cos[:rows],
            self.sin[:rows],
            self.key_slots[:keys],
            self.q_starts,
            self.k_starts,
            self.last_rows,
            self.lengths,
            self.tables.view(-1)[: SEQUENCES * width].view(SEQUENCES, width),
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in the order in which the kernel takes them."""
        return (
            self.ids,
            self.slots,
            self.cos,
            self.sin,
            self.key_slots,
            self.q_starts,
            self.k_starts,
            self.last_rows,
            self.lengths,
            self.tables,
        )


def stage_prompts(
    to: StagedPrompts,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: tuple[Sequence[int], Sequence[int]],
    block_tokens: int,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Fill `to` with a batch that has room in it, padding behind. ids, positions, slots i64[T];
    tables i32[B, W]; lengths: rows and keys of each prompt, on the host; rotary: cos and sin
    f32[P, head_dim] with P above all positions.
    """
    q_lens, kv_lens = lengths
    missing = SEQUENCES - len(q_lens)
    first_rows = [0, *accumulate(q_lens)]
    first_rows += first_rows[-1:] * missing
    kv_lens = [*kv_lens, *[0] * missing]
    if not ids.is_cuda:
        _stage_rows(to, ids, positions, slots, rotary)
        _stage_prompts(to, tables, first_rows, kv_lens, block_tokens)
        return
    rows, keys = len(to.ids), len(to.key_slots)
    _kernel().launch(
        (rows + -(-keys // THREADS) + SEQUENCES, 1, 1),
        (THREADS, 1, 1),
        _PROMPTS.pack(*first_rows, *kv_lens),
        ids,
        positions,
        slots,
        tables,
        *rotary,
        *to.tensors(),
        tables.shape[0],
        tables.shape[1],
        rows,
        keys,
        to.tables.shape[1],
        block_tokens,
        rotary[0].shape[1],
    )


def _stage_rows(
    to: StagedPrompts,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> None:
    rows = len(ids)
    to.ids[:rows], to.ids[rows:] = ids, 0
    to.slots[:rows], to.slots[rows:] = slots, -1
    for there, table in zip((to.cos, to.sin), rotary, strict=True):
        there[:rows, 0], there[rows:, 0] = table[positions], table[0]


def _stage_prompts(
    to: StagedPrompts,
    tables: torch.Tensor,
    first_rows: list[int],
    kv_lens: list[int],
    block_tokens: int,
) -> None:
    count, k_starts = tables.shape[0], [0, *accumulate(kv_lens)]
    to.q_starts[:] = torch.tensor([*first_rows, len(to.ids)])
    to.k_starts[:] = torch.tensor([*k_starts, k_starts[-1]])
    to.lengths[:] = torch.tensor(kv_lens)
    to.last_rows.zero_()
    to.last_rows[:count] = torch.tensor(first_rows[1 : count + 1]) - 1
    width = min(tables.shape[1], to.tables.shape[1])
    to.tables[:count, :width] = tables[:, :width]
    to.key_slots.zero_()
    for table, begin, kv_len in zip(tables, k_starts, kv_lens, strict=False):
        of_blocks = table.unsqueeze(1) * block_tokens + torch.arange(block_tokens)
        to.key_slots[begin : begin + kv_len] = of_blocks.flatten()[:kv_len]
