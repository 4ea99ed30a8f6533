"""The tensors of one forward pass, and how a plan becomes them.

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
