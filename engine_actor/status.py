"""status(): what an operator asks first, in one dict of plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from engine_actor import ops
from engine_actor.core.plan import OverlapMode
from engine_actor.engine import Engine
from engine_actor.loop import Heartbeat
from engine_actor.model.memory import memory_status
from engine_actor.work.streams import DECODE_PRIORITY, PREFILL_PRIORITY


def engine_status(engine: Engine, epoch: int, heartbeat: Heartbeat, clients: int) -> dict[str, Any]:
    """Counts, bytes and switches. Called on the engine's thread."""
    config, facts, metrics = engine.config, engine.facts, engine.metrics
    return {
        "engine": facts.name,
        "epoch": epoch,
        "draining": engine.draining,
        "clients": clients,
        **_overlap(engine),
        "async_steps": config.async_steps,
        "async_steps_effective": engine.depth > 0,
        "async_steps_reason": async_reason(engine),
        "cuda_graphs": asdict(engine.runner.graph_counts),
        "prefill_graphs": asdict(engine.runner.prefill_graph_counts),
        "prefill_steps_total": int(metrics.value("prefill_steps_total")),
        "model": _model(engine),
        "memory": _memory(engine),
        "kv": _kv(engine),
        "queue": _queue(engine),
        "config": config.model_dump(mode="json"),
        "heartbeat": {
            "alive": heartbeat.alive,
            "busy_seconds": heartbeat.busy_seconds,
            "steps": heartbeat.steps,
            "fatal": heartbeat.fatal,
        },
    }


def overlap_reason(engine: Engine) -> str | None:
    """Why decode and prefill do not share the device as `overlap_mode` says; None where they do."""
    if not engine.config.enable_prefill_decode_overlap:
        return "switched off (enable_prefill_decode_overlap: false)"
    if engine.pair.mode.value == engine.config.overlap_mode:
        return None
    return engine.pair.reason


def _overlap(engine: Engine) -> dict[str, Any]:
    """The switch, the mode that was asked for, what it comes to here and why, and the counters."""
    config, pair, metrics = engine.config, engine.pair, engine.metrics
    counters = (
        "prefill_decode_overlap_steps",
        "prefill_decode_stream_overlap_steps",
        "prefill_decode_mixed_forward_steps",
    )
    return {
        "prefill_decode_overlap": config.enable_prefill_decode_overlap,
        "prefill_decode_overlap_effective": pair.mode is not OverlapMode.SERIAL,
        "prefill_decode_overlap_reason": overlap_reason(engine),
        "overlap_mode": config.overlap_mode,
        "overlap_mode_effective": pair.mode.value,
        "overlap_max_ctas": pair.max_ctas,
        "overlap_stream_priorities": _priorities(pair.mode),
        **{name: int(metrics.value(name)) for name in counters},
    }


def _priorities(mode: OverlapMode) -> dict[str, int] | None:
    """Of the two streams, the lower number first; None where there are none."""
    if mode in (OverlapMode.SERIAL, OverlapMode.MIXED):
        return None
    return {"decode": DECODE_PRIORITY, "prefill": PREFILL_PRIORITY}


def async_reason(engine: Engine) -> str | None:
    """Why a step is finished before the next one is launched; None where it is not."""
    if engine.depth > 0:
        return None
    if not engine.config.async_steps:
        return "switched off (async_steps: false)"
    if engine.config.pipeline_depth == 0:
        return "switched off (pipeline_depth: 0)"
    return "the CPU has done a step when it is launched"


def _model(engine: Engine) -> dict[str, Any]:
    facts = engine.facts
    card = ops.device_info(torch.device(facts.device))
    return {
        "name": facts.model,
        "family": facts.family,
        "weights": facts.weights,
        "numerics": facts.numerics,
        "device": facts.device,
        "card": card.name,
        "card_uuid": card.uuid,
        "layer_kernels": facts.layer_kernels,
        "fingerprint": facts.fingerprint,
        "vocab_size": facts.vocab_size,
        "max_model_len": facts.max_model_len,
        "eos_token_ids": list(facts.eos_token_ids),
    }


def _memory(engine: Engine) -> dict[str, Any]:
    facts = engine.facts
    return {
        "weight_bytes": facts.weight_bytes,
        "kv_budget_bytes": facts.kv_blocks * facts.kv_block_bytes,
        "kv_bytes": engine.elastic.n_blocks * facts.kv_block_bytes,
        "reserve_bytes": engine.config.reserve_memory_mb * 2**20,
        **memory_status(torch.device(facts.device)),
        "plan": dict(facts.memory_plan),
        "oom_isolated_total": int(engine.metrics.value("oom_isolated_total")),
        "oom_retries_total": int(engine.metrics.value("oom_retries_total")),
    }


def _kv(engine: Engine) -> dict[str, Any]:
    return {
        "block_tokens": engine.kv.block_tokens,
        "dtype": engine.facts.kv_dtype,
        "prefix_cache": engine.kv.prefix_cache,
        "blocks_total": engine.kv.capacity,
        "blocks_free": engine.kv.n_free,
        "blocks_cached": engine.kv.n_cached,
        "blocks_in_memory": engine.elastic.n_blocks,
        "blocks_budget": engine.facts.kv_blocks,
        "addresses_fixed": engine.facts.kv_moves is None,
        "addresses_reason": engine.facts.kv_moves,
        "host": _host(engine),
    }


def _host(engine: Engine) -> dict[str, Any]:
    """The tier of evicted blocks in the host's memory; copies_reason: why they are made one by one,
    None where one launch makes them all.
    """
    tier, store = engine.kv.tier, engine.copies.store
    return {
        "blocks_total": tier.n_slots,
        "blocks_used": len(tier),
        "bytes": 0 if store is None else store.nbytes,
        "copies_reason": None if store is None else store.reason,
        "blocks_out": tier.n_copied_out,
        "blocks_back": tier.n_copied_back,
        "blocks_dropped": tier.n_dropped,
    }


def _queue(engine: Engine) -> dict[str, Any]:
    stats, limits = engine.scheduler.stats, engine.scheduler.limits
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "preemptions": stats.preemptions,
        "max_num_seqs": limits.max_num_seqs,
        "max_queue": limits.max_queue,
        "prefill_chunk_tokens": limits.prefill_chunk_tokens,
        "max_partial_prefills": limits.max_partial_prefills,
        "arrivals": list(engine.recorder.arrivals),
    }
