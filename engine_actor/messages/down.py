"""Messages down, client to engine, as tuples with their tag first.

Frozen dataclasses inside, tuples outside, so that a message costs a few microseconds and unpickles
without importing torch. Knows no transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import cast, get_args

from engine_actor.core.params import SamplingParams
from engine_actor.messages import packing as wire
from engine_actor.messages.types import Beat, Cancel, CancelReason, Evict, Limit, Message, Submit

_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
_CANCEL_REASONS = frozenset(get_args(CancelReason))


def encode_messages(messages: Iterable[Message]) -> list[tuple[object, ...]]:
    """Messages as tuples, tag first. Raises ValueError where a field does not fit the wire."""
    return [_encode_message(message) for message in messages]


def decode_messages(items: object) -> list[Message]:
    """The inverse of encode_messages. Raises ValueError naming the message and the field."""
    if not isinstance(items, (list, tuple)):
        raise ValueError(f"messages: expected a list, got {type(items).__name__}")
    return [decode_message(item) for item in items]


def decode_message(item: object) -> Message:
    """One message from its tuple. Raises ValueError; an unknown tag is refused by name."""
    if not isinstance(item, (tuple, list)) or not item:
        raise ValueError("message: expected a tuple with its tag first")
    decode = _DECODERS.get(item[0]) if isinstance(item[0], str) else None
    if decode is None:
        raise ValueError(f"message: unknown tag {item[0]!r}")
    return decode(item)


def _encode_message(message: Message) -> tuple[object, ...]:
    match message:
        case Submit():
            sampling = tuple(getattr(message.sampling, name) for name in _SAMPLING_FIELDS)
            ids = wire.pack("u32", message.prompt_ids, "prompt_ids")
            rest = (message.priority, message.deadline_ms, message.salt, message.trace_id)
            return ("submit", wire.expect_uint(message.rid, 32, "rid"), ids, sampling, *rest)
        case Cancel():
            return ("cancel", message.rid, message.reason, message.owner)
        case Evict():
            return ("evict", message.rid, message.reason, message.requeue, message.owner)
        case Limit():
            return ("limit", {k: v for k, v in _limits(message).items() if v is not None})
        case Beat():
            return ("beat",)


def _decode_submit(item: object) -> Submit:
    _, rid, ids, sampling, priority, deadline_ms, salt, trace_id = wire.expect_fields(
        item, 8, "submit"
    )
    return Submit(
        rid=wire.expect_uint(rid, 32, "submit.rid"),
        prompt_ids=wire.unpack("u32", ids, "submit.prompt_ids"),
        sampling=_decode_sampling(sampling),
        priority=wire.expect_sint(priority, 32, "submit.priority"),
        deadline_ms=None
        if deadline_ms is None
        else wire.expect_uint(deadline_ms, 63, "submit.deadline_ms"),
        salt=wire.expect(salt, str, "submit.salt"),
        trace_id=wire.expect(trace_id, str, "submit.trace_id"),
    )


def _decode_sampling(item: object) -> SamplingParams:
    values = dict(
        zip(
            _SAMPLING_FIELDS,
            wire.expect_fields(item, len(_SAMPLING_FIELDS), "submit.sampling"),
            strict=True,
        )
    )
    for name in ("max_tokens", "min_tokens", "top_k"):
        wire.expect_uint(values[name], 31, f"submit.sampling.{name}")
    for name in ("seed", "logprobs", "prompt_logprobs"):
        if values[name] is not None:
            wire.expect(values[name], int, f"submit.sampling.{name}")
    for name in _FLOAT_FIELDS:
        wire.expect_number(values[name], f"submit.sampling.{name}")
    wire.expect(values["ignore_eos"], bool, "submit.sampling.ignore_eos")
    values["stop_token_ids"] = wire.expect_ints(
        values["stop_token_ids"], "submit.sampling.stop_token_ids"
    )
    values["logit_bias"] = wire.expect_pairs(values["logit_bias"], "submit.sampling.logit_bias")
    return SamplingParams(**values)  # type: ignore[arg-type]


_FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def _decode_cancel(item: object) -> Cancel:
    _, rid, reason, owner = wire.expect_fields(item, 4, "cancel")
    if wire.expect(reason, str, "cancel.reason") not in _CANCEL_REASONS:
        raise ValueError(f"cancel.reason: {reason!r} is not one of {sorted(_CANCEL_REASONS)}")
    return Cancel(
        rid=wire.expect_uint(rid, 32, "cancel.rid"),
        reason=cast(CancelReason, reason),
        owner=wire.expect(owner, str, "cancel.owner"),
    )


def _decode_evict(item: object) -> Evict:
    _, rid, reason, requeue, owner = wire.expect_fields(item, 5, "evict")
    return Evict(
        rid=wire.expect_uint(rid, 32, "evict.rid"),
        reason=wire.expect(reason, str, "evict.reason"),
        requeue=wire.expect(requeue, bool, "evict.requeue"),
        owner=wire.expect(owner, str, "evict.owner"),
    )


def _decode_limit(item: object) -> Limit:
    _, limits = wire.expect_fields(item, 2, "limit")
    if not isinstance(limits, dict):
        raise ValueError(f"limit: expected a dict, got {type(limits).__name__}")
    unknown = sorted(map(str, limits.keys() - _limits(Limit()).keys()))
    if unknown:
        raise ValueError(f"limit: unknown key {unknown[0]!r}")
    fraction = limits.get("kv_fraction")
    if fraction is not None and not 0.0 < wire.expect_number(fraction, "limit.kv_fraction") <= 1.0:
        raise ValueError(f"limit.kv_fraction: must be in (0, 1], got {fraction}")
    counts: dict[str, int | None] = {}
    for name in ("max_num_seqs", "prefill_chunk_tokens"):
        value = limits.get(name)
        counts[name] = None if value is None else wire.expect_uint(value, 31, f"limit.{name}")
        if value == 0:
            raise ValueError(f"limit.{name}: must be at least 1")
    return Limit(None if fraction is None else float(fraction), **counts)


def _decode_beat(item: object) -> Beat:
    wire.expect_fields(item, 1, "beat")
    return Beat()


_DECODERS: dict[str, Callable[[object], Message]] = {
    "submit": _decode_submit,
    "cancel": _decode_cancel,
    "evict": _decode_evict,
    "limit": _decode_limit,
    "beat": _decode_beat,
}


def _limits(message: Limit) -> dict[str, float | int | None]:
    return {field.name: getattr(message, field.name) for field in fields(message)}
