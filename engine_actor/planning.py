"""The memory plan of a configuration: what a checkpoint's headers and a card say, before any load.

Knows the checkpoint and the configuration; what they add up to is model/card_plan.py's. Runs on a
machine without a GPU as well, for a card of a given size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from configs.schema import CHUNK_TOKENS, AppArgs, EngineConfig
from engine_actor import ops
from engine_actor.load.checkpoint import Checkpoint, context_length
from engine_actor.load.footprint import (
    WeightBytes,
    all_in_strips,
    has_gated,
    head_of,
    weight_bytes,
    with_small_embedding,
)
from engine_actor.model.card_fit import plan_card
from engine_actor.model.card_plan import Card, CardPlan, Part, Request, Settings, allowance
from engine_actor.model.config import ModelConfig
from engine_actor.model.host_blocks import host_slots
from engine_actor.model.kv_store import array_block_bytes, kv_bytes_per_block
from engine_actor.model.layer_ops import LayerShape, explain_layer
from engine_actor.model.ledger import MIB
from engine_actor.model.memory import card_of
from engine_actor.model.precision import compute_dtype, resolve_kv_dtype
from engine_actor.model.prefill_buckets import ROWS
from engine_actor.model.step_bytes import StepShape, step_parts

SMALL_CARD_BYTES = 12 << 30
CHUNKS = {8192: 20 << 30, 2048: 10 << 30, CHUNK_TOKENS: 0}
"""Prompt tokens of a step where nobody says, and the memory for the engine from which on."""
BURST_TOKENS = 2048
"""Of prompts in one step while a crowd of them waits: nearly the whole rate of a large GPU."""
PREFILL_GRAPHS_FROM = 20 << 30
"""Memory for the engine from which on small chunks get graphs where nobody says: a card that has
less of it is slower as well, and its host keeps up with it.
"""
BURST_GRAPHS_FROM = 64 << 30
"""The same for chunks as large as a burst: cards of less memory take several times as long for one
as the host.
"""
LEAST_SM = 80
"""Of the kernels that read strips at any number of rows."""
STREAMS_OF_A_PAIR = 3
"""The caller's, decode's and prefill's; without overlap the caller's alone."""


def plan_for(args: AppArgs, checkpoint: Checkpoint, card: Card, sm: int, held: int = 0) -> CardPlan:
    """The plan of an engine of `checkpoint` on `card` with compute capability sm / 10. held: bytes
    that this process has taken already and keeps. Where the chunk is left open, with the largest
    one that suits the card and fits. Raises ValueError for settings that contradict each other.
    The checkpoint may be any object with `config`, `entries` and usable_vocab_size().
    """
    asked = args.engine.prefill_chunk_tokens
    sizes = CHUNKS if asked is None else (asked,)
    for tokens in sizes:
        plan = _plan(args, checkpoint, card, sm, held, tokens)
        is_small = plan.allowance < CHUNKS.get(tokens, 0)
        if tokens in (asked, CHUNK_TOKENS) or not (is_small or plan.refusal):
            return _with_host(plan, args.engine, checkpoint.config)
    raise AssertionError("the least chunk suits every card")


def _with_host(plan: CardPlan, config: EngineConfig, model: ModelConfig) -> CardPlan:
    """The plan with the tier that the host keeps beside the card."""
    device = torch.device("cuda")
    dtype = resolve_kv_dtype(model, device, config.numerics, config.kv.dtype)
    block_bytes = kv_bytes_per_block(model, dtype, config.kv.block_tokens)
    slots = host_slots(config, block_bytes)
    return replace(plan, host=(slots, slots * block_bytes))


def with_chunk(config: EngineConfig, tokens: int) -> EngineConfig:
    """The settings with the planned chunk where it was left open. A chunk that was made large is
    sliced beside decodes, so that a stream waits no longer than for CHUNK_TOKENS.
    """
    if config.prefill_chunk_tokens is not None:
        return config
    slice_tokens, burst_tokens = config.prefill_slice_tokens, config.prefill_burst_tokens
    if slice_tokens is None and tokens > CHUNK_TOKENS:
        slice_tokens = CHUNK_TOKENS
        burst_tokens = min(tokens, BURST_TOKENS) if burst_tokens is None else burst_tokens
    chosen = {
        "prefill_chunk_tokens": tokens,
        "prefill_slice_tokens": slice_tokens,
        "prefill_burst_tokens": burst_tokens,
    }
    return config.model_copy(update=chosen)


def prefill_graph_rows(config: EngineConfig, allowed: int) -> int:
    """Tokens of the largest chunks that are captured on a card with so many bytes for the engine, 0
    for none: small ones, and a crowd's where a burst is larger and the card computes it about as
    fast as its host launches it.
    """
    wanted = config.prefill_graphs
    if wanted is None:
        wanted = config.cuda_graphs and allowed >= PREFILL_GRAPHS_FROM
    if not wanted:
        return 0
    burst_tokens = config.prefill_burst_tokens if allowed >= BURST_GRAPHS_FROM else None
    return min(config.chunk_tokens, max(ROWS[-1], burst_tokens or 0))


def _plan(
    args: AppArgs, checkpoint: Checkpoint, card: Card, sm: int, held: int, chunk_tokens: int
) -> CardPlan:
    config, model = args.engine, checkpoint.config
    limit = None if config.memory_limit_mb is None else config.memory_limit_mb * MIB
    reserve = config.reserve_memory_mb * MIB
    device = torch.device("cuda")
    kv_dtype = resolve_kv_dtype(model, device, config.numerics, config.kv.dtype)
    exact = config.numerics == "exact"
    config = with_chunk(config, chunk_tokens)
    shape = _step_shape(config, checkpoint, sm, allowance(card, limit, reserve))
    weights = weight_bytes(model, checkpoint.entries, shape.item_bytes, exact)
    request = Request(
        card=card,
        limit=limit,
        reserve=reserve,
        settings=Settings(
            max_model_len=context_length(args.model, checkpoint),
            max_num_seqs=config.max_num_seqs,
            chunk_tokens=chunk_tokens,
            int8_kv=kv_dtype == torch.int8,
        ),
        parts=partial(_parts, weights, shape, held),
        loading=weights.loading + held,
        pool_bytes=partial(_pool_bytes, model, kv_dtype, config.kv.block_tokens, card),
        block_tokens=config.kv.block_tokens,
        budget=None if config.kv.budget_mb == "auto" else config.kv.budget_mb * MIB,
        is_length_asked=args.model.max_model_len is not None,
        can_int8=not exact and takes_int8(config, model),
    )
    plan = plan_card(request)
    smaller = with_small_embedding(model, checkpoint.entries, weights)
    if plan.refusal is None or smaller is None:
        return plan
    other = plan_card(replace(request, parts=partial(_parts, smaller, shape, held)))
    if other.refusal is not None:
        return plan
    longest = other.settings.max_model_len
    line = f"quantize --embedding-bits 4, model.max_model_len: {longest}"
    return replace(plan, instead=(*plan.instead, line))


def _step_shape(config: EngineConfig, checkpoint: Checkpoint, sm: int, allowed: int) -> StepShape:
    """What steps on such a card look like, with so many bytes for the engine."""
    model = checkpoint.config
    dtype = compute_dtype(model, torch.device("cuda"), config.numerics)
    exact = config.numerics == "exact"
    packed = not exact and sm >= LEAST_SM and all_in_strips(model, checkpoint.entries)
    head_bits, head_rows = head_of(model, checkpoint.entries)
    kv_dtype = resolve_kv_dtype(model, torch.device("cuda"), config.numerics, config.kv.dtype)
    in_buckets = takes_layer_kernels(config, model, kv_dtype)
    return StepShape(
        model=model,
        vocab_size=checkpoint.usable_vocab_size(),
        item_bytes=dtype.itemsize,
        head_bits=head_bits,
        head_rows=head_rows,
        sm=sm,
        streams=STREAMS_OF_A_PAIR if config.enable_prefill_decode_overlap else 1,
        partial_prefills=config.max_partial_prefills,
        block_tokens=config.kv.block_tokens,
        in_buckets=in_buckets,
        graphs=in_buckets and config.cuda_graphs,
        prefill_graph_rows=prefill_graph_rows(config, allowed) if in_buckets else 0,
        small_workspaces=wants_small_workspaces(allowed),
        in_strips=packed,
        gated=packed and has_gated(checkpoint.entries) and dtype == torch.float16,
    )


def plan_here(args: AppArgs, checkpoint: Checkpoint, device: torch.device) -> CardPlan:
    """The plan for a CUDA device of this machine as it is now. Raises as plan_for()."""
    card, held = card_of(device)
    return plan_for(args, checkpoint, card, ops.device_info(device).sm, held)


def wants_small_workspaces(allowed: int) -> bool:
    """Whether a card of so many bytes is better off with small workspaces of cuBLAS."""
    return allowed < SMALL_CARD_BYTES


def takes_int8(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether the layer kernels could read an INT8 cache of this model, a compiler given."""
    return takes_layer_kernels(config, model, torch.int8)


def takes_layer_kernels(config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype) -> bool:
    """Whether layers of this model could run their kernels beside such a cache, a compiler given:
    without them no step has a fixed shape, so there is nothing to capture.
    """
    dtype = compute_dtype(model, torch.device("cuda"), config.numerics)
    is_int8 = kv_dtype == torch.int8
    if config.numerics == "exact" or not (is_int8 or kv_dtype == dtype):
        return False
    shape = LayerShape(
        torch.device("cuda"),
        dtype,
        model.head_dim,
        config.kv.block_tokens,
        bits=8 if is_int8 else 0,
    )
    return not any(verdict.refusal for verdict in explain_layer(shape)[1:])


def _parts(weights: WeightBytes, shape: StepShape, held: int, settings: Settings) -> Sequence[Part]:
    parts = [Part("weights", weights.resident, "", True), *step_parts(shape, settings)]
    return [*parts, Part("held already", held, "", True)] if held else parts


def _pool_bytes(
    model: ModelConfig,
    dtype: torch.dtype,
    block_tokens: int,
    card: Card,
    blocks: int,
    settings: Settings,
) -> int:
    kept = torch.int8 if settings.int8_kv else dtype
    arrays = array_block_bytes(model, kept, block_tokens)
    if not card.granularity:
        # torch holds the layers; while one grows it is there twice.
        return blocks * (sum(arrays) + max(arrays))
    return ops.full_bytes(arrays, blocks, card.granularity)


def render(plan: CardPlan) -> str:
    """The plan as a table, and what it means in sequences and tokens."""
    card = plan.card
    rows: list[tuple[str, int, str]] = [("card", card.total, _outside(card))]
    if plan.limit is not None:
        rows.append(("memory_limit_mb", plan.limit, "torch, KV pool and reserve together"))
    rows += [
        ("reserve", plan.reserve, "left alone; the CUDA context lies in it"),
        ("for the engine", plan.allowance, ""),
        *((f"  {part.name}", part.nbytes, part.note) for part in plan.parts),
    ]
    if plan.refusal is None:
        note = f"{plan.kv_blocks} blocks, {plan.kv_tokens} tokens"
        rows.append(("  KV pool", plan.kv_bytes, note))
        rows.append(("  unplanned", plan.allowance - plan.planned, ""))
    slots, on_host = plan.host
    if slots:
        note = f"page-locked: {slots} evicted blocks, {slots * plan.block_tokens} tokens"
        rows.append(("on the host", on_host, note))
    width = max(len(name) for name, _, _ in rows)
    lines = [
        f"{name:<{width}} {nbytes / MIB:>9.0f} MiB  {note}".rstrip() for name, nbytes, note in rows
    ]
    return "\n".join([*lines, *_meaning(plan)])


def _outside(card: Card) -> str:
    return f"{card.outside / MIB:.0f} MiB taken by contexts and others" if card.outside else ""


def _meaning(plan: CardPlan) -> list[str]:
    if plan.refusal is not None:
        return [f"does not fit: {plan.refusal}", *(f"would fit: {line}" for line in plan.instead)]
    longest = plan.settings.max_model_len
    lines = [f"context {longest} tokens; sequences at once: {plan.sequences(longest)} of that"]
    shorter = [tokens for tokens in (512, 1024, 2048, 4096, 8192) if tokens < longest]
    lines[0] += "".join(f", {plan.sequences(tokens)} of {tokens}" for tokens in shorter)
    return lines
