"""The last token of every running sequence, on the device: what lets a step read a token that the
host does not know yet.

The scheduler gives each running sequence a slot and keeps it until the last launched work that may
use it is joined. Knows slots; knows no sequence.
"""

from __future__ import annotations

import torch


class TokenBuffer:
    """`tokens` i64[n]: written by the sampling of one step, read by the inputs of the next, both on
    the stream that samples."""

    def __init__(self, device: torch.device, n_slots: int) -> None:
        self.tokens = torch.zeros(n_slots, dtype=torch.int64, device=device)

    def reach(self, slot: int) -> torch.Tensor:
        """`tokens` with `slot` in it. What an open step reads of a smaller one stays as it was."""
        n_slots = len(self.tokens)
        if slot >= n_slots:
            grown = self.tokens.new_zeros(max(slot + 1, 2 * n_slots))
            grown[:n_slots] = self.tokens
            self.tokens = grown
        return self.tokens

    def read(self, ids: torch.Tensor, slots: torch.Tensor, all_in_flight: bool) -> torch.Tensor:
        """ids i64[T] with each negative one of the first n replaced by the last token of its slot
        (slots i64[n]), as it will be when the stream comes here. all_in_flight: all n are negative.
        """
        n_slots = len(slots)
        first, found = ids[:n_slots], self.tokens.index_select(0, slots)
        if not all_in_flight:
            found = torch.where(first < 0, found, first)
        return found if n_slots == len(ids) else torch.cat((found, ids[n_slots:]))
