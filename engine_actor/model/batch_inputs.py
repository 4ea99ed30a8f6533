"""The tensors of one forward pass: what the runner is given. `work/inputs.py` makes them of a plan.

Knows blocks and positions; knows no request, no sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One ragged batch of B sequences and T tokens in all (T = sum of q_lens).

    ids i64[T]; positions i64[T]; slots i64[T] = block * block_tokens + offset, where the KV of each
    token is written; block_tables i32[B, max_blocks], right-padded with 0; logit_rows i64[R], the
    rows of T whose logits are wanted (default: the last row of each sequence).
    Host copies, so that the CPU path and the launch code never synchronise: q_lens (new tokens per
    sequence), kv_lens (keys visible to the last of them), block_lists (block ids per sequence),
    wanted (the sequences whose last rows logit_rows are; None where it may name any rows).
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
    wanted: tuple[int, ...] | None = None

    @property
    def n_tokens(self) -> int:
        """T, the rows of the hidden state."""
        return sum(self.q_lens)

    def host_slots(self) -> list[int]:
        """`slots` from the host's copies, so that a GPU is not made to wait."""
        size, found = self.block_tokens, []
        for q_len, kv_len, blocks in zip(self.q_lens, self.kv_lens, self.block_lists, strict=True):
            found += [blocks[p // size] * size + p % size for p in range(kv_len - q_len, kv_len)]
        return found
