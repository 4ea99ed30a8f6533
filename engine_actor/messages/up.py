"""Batches up, engine to client: one tuple per scheduler step. Knows no transport."""

from __future__ import annotations

from dataclasses import astuple, fields

from engine_actor.core.plan import TokenLogprobs
from engine_actor.messages import packing as wire
from engine_actor.messages.types import Extra, Flag, Load, StepBatch, Usage


def encode_batch(batch: StepBatch) -> tuple[object, ...]:
    """A StepBatch as (seq, time_ns, rids, counts, tokens, flags, extra, load, kv_events)."""
    if len(batch.rids) != len(batch.counts) or len(batch.rids) != len(batch.flags):
        raise ValueError("batch: rids, counts and flags differ in length")
    return (
        batch.seq,
        batch.time_ns,
        wire.pack("u32", batch.rids, "rids"),
        wire.pack("u16", batch.counts, "counts"),
        wire.pack("u32", batch.tokens, "tokens"),
        wire.pack("u8", batch.flags, "flags"),
        tuple((rid, _encode_extra(extra)) for rid, extra in batch.extra),
        astuple(batch.load),
        (batch.kv_added, batch.kv_evicted),
    )


def decode_batch(item: object) -> StepBatch:
    """The inverse of encode_batch. Raises ValueError naming the field."""
    seq, time_ns, rids, counts, tokens, flags, extra, load, kv_events = wire.expect_fields(
        item, 9, "batch"
    )
    flag_values = wire.unpack("u8", flags, "batch.flags")
    if flag_values and max(flag_values) > Flag.REQUEUED:
        raise ValueError(f"batch.flags: unknown flag {max(flag_values)}")
    added, evicted = wire.expect_fields(kv_events, 2, "batch.kv_events")
    batch = StepBatch(
        seq=wire.expect(seq, int, "batch.seq"),
        time_ns=wire.expect(time_ns, int, "batch.time_ns"),
        rids=wire.unpack("u32", rids, "batch.rids"),
        counts=wire.unpack("u16", counts, "batch.counts"),
        tokens=wire.unpack("u32", tokens, "batch.tokens"),
        flags=tuple(_FLAGS[value] for value in flag_values),
        extra=_decode_extras(extra),
        load=Load(
            *wire.expect_ints(
                wire.expect_fields(load, len(fields(Load)), "batch.load"), "batch.load"
            )
        ),
        kv_added=_hashes(added),
        kv_evicted=_hashes(evicted),
    )
    if not len(batch.rids) == len(batch.counts) == len(batch.flags):
        raise ValueError("batch: rids, counts and flags differ in length")
    if sum(batch.counts) != len(batch.tokens):
        raise ValueError(f"batch: counts add up to {sum(batch.counts)}, tokens {len(batch.tokens)}")
    return batch


_FLAGS = tuple(Flag)


def _encode_extra(extra: Extra) -> tuple[object, ...]:
    usage = extra.usage
    return (
        None
        if usage is None
        else (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        extra.stop_token,
        extra.error_code,
        extra.blocks_needed,
        extra.blocks_free,
        tuple((entry.token, entry.logprob, entry.top) for entry in extra.logprobs),
        extra.prompt_start,
        tuple((entry.token, entry.logprob, entry.top) for entry in extra.prompt_logprobs),
    )


def _decode_extras(item: object) -> tuple[tuple[int, Extra], ...]:
    if not isinstance(item, (tuple, list)):
        raise ValueError(f"batch.extra: expected a tuple, got {type(item).__name__}")
    pairs = (wire.expect_fields(entry, 2, "batch.extra") for entry in item)
    return tuple(
        (wire.expect_uint(rid, 32, "batch.extra.rid"), _decode_extra(e)) for rid, e in pairs
    )


def _decode_extra(item: object) -> Extra:
    usage, stop_token, code, needed, free, logprobs, prompt_start, prompt_logprobs = (
        wire.expect_fields(item, 8, "batch.extra")
    )
    return Extra(
        usage=None
        if usage is None
        else Usage(*wire.expect_ints(wire.expect_fields(usage, 3, "usage"), "usage")),
        stop_token=None if stop_token is None else wire.expect(stop_token, int, "stop_token"),
        error_code=None if code is None else wire.expect(code, str, "error_code"),
        blocks_needed=wire.expect(needed, int, "blocks_needed"),
        blocks_free=wire.expect(free, int, "blocks_free"),
        logprobs=_decode_logprobs(logprobs, "logprobs"),
        prompt_start=wire.expect(prompt_start, int, "prompt_start"),
        prompt_logprobs=_decode_logprobs(prompt_logprobs, "prompt_logprobs"),
    )


def _decode_logprobs(item: object, name: str) -> tuple[TokenLogprobs, ...]:
    if not isinstance(item, (tuple, list)):
        raise ValueError(f"{name}: expected a tuple, got {type(item).__name__}")
    entries = (wire.expect_fields(entry, 3, name) for entry in item)
    return tuple(
        TokenLogprobs(
            wire.expect(token, int, name),
            wire.expect_number(logprob, name),
            wire.expect_pairs(top, name),
        )
        for token, logprob, top in entries
    )


def _hashes(item: object) -> tuple[bytes, ...]:
    if not isinstance(item, (tuple, list)):
        raise ValueError(f"batch.kv_events: expected a tuple, got {type(item).__name__}")
    return tuple(wire.expect(entry, bytes, "batch.kv_events") for entry in item)
