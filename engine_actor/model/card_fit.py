"""The search for a memory plan: the largest pool and the longest context that fit a card, and
where nothing fits, why and what would.

Pure arithmetic on `card_plan`'s values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from engine_actor.model.card_plan import CardPlan, Request, Settings, allowance
from engine_actor.model.ledger import MIB

LEAST_CONTEXT = 1024
"""Tokens of one sequence that must fit where nobody asked for a context."""
LEAST_CHUNK = 32
"""Prompt tokens of a step below which nobody wants to go."""


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
    if not plan.allowance:
        whole = min(request.card.total, request.limit or request.card.total)
        return f"what is left alone takes all of {_mib(whole)}"
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
