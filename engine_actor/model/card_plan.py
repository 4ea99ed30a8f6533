"""The memory of one GPU, planned before anything is loaded: what is asked, and the plan that
answers. `card_fit` finds it.

Pure arithmetic on bytes: knows neither torch's allocator nor a checkpoint. `parts` of a request
answers what the parts take under given settings, so that other settings can be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine_actor.model.ledger import MIB

LATER_BYTES = 192 * MIB
"""Beside what is taken on the card already: kernels that load with use (172 MiB on an H200) and
the driver's part of the graphs (18 MiB for 30).
"""


@dataclass(frozen=True, slots=True)
class Card:
    """total: bytes of memory. outside: taken neither by torch nor by the KV pool (CUDA contexts,
    loaded kernels, other processes). granularity: of memory that is mapped, 0 where none is.
    """

    total: int
    outside: int = 0
    granularity: int = 2 * MIB


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user could change to make a model fit."""

    max_model_len: int
    max_num_seqs: int
    chunk_tokens: int
    int8_kv: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the table, in bytes. at_load: taken by the time the weights are there."""

    name: str
    nbytes: int
    note: str = ""
    at_load: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """limit: bytes that torch, the KV pool and the reserve may take together, None for the card's.
    reserve: left alone. parts: every part but the KV pool, resident first; `loading` bytes beside
    the weights are needed only before the others are there. block_bytes: of the arrays of one KV
    block. pool_bytes: of a pool of (blocks, settings). budget: most for KV, None for what is left.
    is_length_asked: whether somebody asked for max_model_len, or it may be cut to what fits.
    """

    card: Card
    limit: int | None
    reserve: int
    settings: Settings
    parts: Callable[[Settings], Sequence[Part]]
    loading: int
    pool_bytes: Callable[[int, Settings], int]
    block_tokens: int
    budget: int | None = None
    is_length_asked: bool = False
    can_int8: bool = True


@dataclass(frozen=True, slots=True)
class CardPlan:
    """allowance: bytes for torch and the KV pool together. kv_blocks: of the pool at its largest,
    0 where the plan does not fit; refusal says then why, `instead` what would fit, one each. host:
    blocks and bytes that the host keeps of evicted prefixes, not a part of the card's.
    """

    allowance: int
    reserve: int
    limit: int | None
    card: Card
    parts: tuple[Part, ...]
    settings: Settings
    block_tokens: int
    kv_blocks: int
    kv_bytes: int
    refusal: str | None = None
    instead: tuple[str, ...] = ()
    host: tuple[int, int] = (0, 0)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.kv_blocks * self.block_tokens

    @property
    def planned(self) -> int:
        """All parts and the KV pool."""
        return sum(part.nbytes for part in self.parts) + self.kv_bytes

    @property
    def later(self) -> int:
        """Of all parts, what is taken only with use."""
        return sum(part.nbytes for part in self.parts if not part.at_load)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, in bytes."""
        return {
            "allowance": self.allowance,
            "reserve": self.reserve,
            "limit": self.limit,
            "card": self.card.total,
            "outside": self.card.outside,
            "parts": {part.name: part.nbytes for part in self.parts},
            "kv": self.kv_bytes,
            "kv_blocks": self.kv_blocks,
            "max_model_len": self.settings.max_model_len,
            "host": self.host[1],
        }

    def sequences(self, tokens: int) -> int:
        """How many sequences of so many tokens fit at once, at most max_num_seqs."""
        each = -(-tokens // self.block_tokens)
        return min(self.settings.max_num_seqs, self.kv_blocks // each)

    def longest(self, sequences: int) -> int:
        """Tokens that each of so many sequences may have, at most max_model_len."""
        return min(self.settings.max_model_len, self.kv_blocks // sequences * self.block_tokens)


def allowance(card: Card, limit: int | None, reserve: int) -> int:
    """Bytes for torch and the KV pool. The reserve is what others may have, and the CUDA context
    is among them: where the card shows that they have more already, so much is left alone. A limit
    counts the reserve as the small card it stands for would, whatever this card's context takes.
    """
    on_card = card.total - max(reserve, card.outside + LATER_BYTES)
    return max(0, on_card if limit is None else min(on_card, limit - reserve))
