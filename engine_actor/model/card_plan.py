"""The memory of one GPU, planned before anything is loaded: what each part takes, what is left for
the KV cache, and what would fit where a configuration does not.

Pure arithmetic on bytes: knows neither torch's allocator nor a checkpoint. `parts` of a request
answers what the parts take under given settings, so that other settings can be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine_actor.model.ledger import MIB

LATER_BYTES = 192 * MIB
"""Beside what is taken on the card already: kernels that load with use (172 MiB on an H200) and
the driver's part of the graphs (18 MiB for 30).
"""
LEAST_CONTEXT = 1024
"""Tokens of one sequence that must fit where nobody asked for a context."""
LEAST_CHUNK = 32
"""Prompt tokens of a step below which nobody wants to go."""


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


def plan_card(request: Request) -> CardPlan:
    """The plan, refused where it cannot fit. Never plans more than the allowance."""
    allowed = allowance(request.card, request.limit, request.reserve)
    settings = request.settings
    if not request.is_length_asked:
        settings = _with_longest(request, settings, allowed)
    plan = _planned(request, settings, allowed)
    refusal = _refusal(request, plan)
    if refusal is None:
        return plan
    can_load = plan.parts[0].nbytes + request.loading <= allowed
    alternatives = tuple(_alternatives(request, allowed)) if can_load else ()
    return replace(plan, kv_blocks=0, kv_bytes=0, refusal=refusal, instead=alternatives)


def _planned(request: Request, settings: Settings, allowed: int) -> CardPlan:
    parts = tuple(request.parts(settings))
    blocks = _blocks(request, settings, allowed - sum(part.nbytes for part in parts))
    return CardPlan(
        allowance=allowed,
        reserve=request.reserve,
        limit=request.limit,
        card=request.card,
        parts=parts,
        settings=settings,
        block_tokens=request.block_tokens,
        kv_blocks=blocks,
        kv_bytes=request.pool_bytes(blocks, settings) if blocks else 0,
    )


def _blocks(request: Request, settings: Settings, left: int) -> int:
    """The largest pool in so many bytes, at most what every sequence could fill."""
    if request.budget is not None:
        left = min(left, request.budget)
    useful = settings.max_num_seqs * _blocks_of(request, settings.max_model_len)
    return _largest(lambda blocks: request.pool_bytes(blocks, settings) <= left, useful)


def _blocks_of(request: Request, tokens: int) -> int:
    return -(-tokens // request.block_tokens)


def _with_longest(request: Request, settings: Settings, allowed: int) -> Settings:
    """The longest context, at most the model's, of which one sequence fits."""
    longest = _largest(
        lambda tokens: _fits(request, replace(settings, max_model_len=tokens), allowed),
        settings.max_model_len,
    )
    return replace(settings, max_model_len=longest or min(LEAST_CONTEXT, settings.max_model_len))


def _fits(request: Request, settings: Settings, allowed: int) -> bool:
    plan = _planned(request, settings, allowed)
    return plan.kv_tokens >= settings.max_model_len


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, 0 where not even 1 does. `fits` is monotone."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _refusal(request: Request, plan: CardPlan) -> str | None:
    fixed = sum(part.nbytes for part in plan.parts)
    weights = plan.parts[0].nbytes
    if weights + request.loading > plan.allowance:
        return (
            f"loading takes {_mib(weights + request.loading)}, "
            f"there are {_mib(plan.allowance)} for it"
        )
    wanted = request.settings.max_model_len
    if not request.is_length_asked:
        wanted = min(wanted, LEAST_CONTEXT)
    if plan.kv_tokens >= wanted:
        return None
    left = plan.allowance - fixed
    what = f"a sequence of {wanted} tokens needs "
    what += _mib(request.pool_bytes(_blocks_of(request, wanted), plan.settings))
    if request.budget is not None and request.budget < left:
        return f"{what} of KV cache, engine.kv.budget_mb leaves {_mib(request.budget)}"
    return f"{what} of KV cache, {_mib(max(0, left))} are left beside {_mib(fixed)}"


def _alternatives(request: Request, allowed: int) -> Iterator[str]:
    """Each setting alone, as far as it must go; where none of them is enough, the longest context
    with all the others at their least.
    """
    settings = request.settings
    if not request.is_length_asked:
        settings = _with_length(settings, min(LEAST_CONTEXT, settings.max_model_len))
    count = 0
    for name, most, changed in (
        ("model.max_model_len", settings.max_model_len, _with_length),
        ("engine.prefill_chunk_tokens", settings.chunk_tokens, _with_chunk),
        ("engine.max_num_seqs", settings.max_num_seqs, _with_seqs),
    ):
        found = _largest(partial(_fits_changed, request, settings, changed, allowed), most - 1)
        if found:
            count += 1
            yield f"{name}: {found}"
    if request.can_int8 and _fits(request, replace(settings, int8_kv=True), allowed):
        count += 1
        yield "engine.kv.dtype: int8"
    if count:
        return
    least = replace(
        settings,
        chunk_tokens=min(LEAST_CHUNK, settings.chunk_tokens),
        max_num_seqs=1,
        int8_kv=settings.int8_kv or request.can_int8,
    )
    tokens = _largest(
        partial(_fits_changed, request, least, _with_length, allowed), settings.max_model_len
    )
    if tokens:
        dtype = ", engine.kv.dtype: int8" if least.int8_kv and not settings.int8_kv else ""
        yield (
            f"engine.prefill_chunk_tokens: {least.chunk_tokens}, engine.max_num_seqs: 1{dtype} "
            f"with model.max_model_len: {tokens}"
        )


def _fits_changed(
    request: Request,
    settings: Settings,
    changed: Callable[[Settings, int], Settings],
    allowed: int,
    value: int,
) -> bool:
    return _fits(request, changed(settings, value), allowed)


def _with_length(settings: Settings, value: int) -> Settings:
    return replace(settings, max_model_len=value)


def _with_chunk(settings: Settings, value: int) -> Settings:
    return replace(settings, chunk_tokens=value)


def _with_seqs(settings: Settings, value: int) -> Settings:
    return replace(settings, max_num_seqs=value)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"
