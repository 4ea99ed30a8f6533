"""The types that cross a process: frozen dataclasses. Their wire form is made in `down` and `up`.

Knows neither tuples nor bytes, no torch, no ray.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import TokenLogprobs

PROTOCOL_VERSION = 1

CancelReason = Literal["client", "stop_string", "deadline", "admin", "lease"]


class Flag(enum.IntEnum):
    """State of one sequence in one StepBatch. REQUEUED never reaches an HTTP client."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4
    OOM = 5
    REQUEUED = 6


@dataclass(frozen=True, slots=True)
class Submit:
    """Start one sequence. `rid` is a u32, unique per (client, epoch). `deadline_ms` is time left,
    made absolute by the engine's clock. Smaller `priority` runs first (0 is the default).
    """

    rid: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    deadline_ms: int | None = None
    salt: str = ""
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End one sequence. Idempotent; an unknown rid leaves a tombstone, so a cancel that overtakes
    its submit still wins. `owner` is the client whose rid it is, "" for the sender itself.
    """

    rid: int
    reason: CancelReason = "client"
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Evict:
    """Free one sequence's blocks: it ends `oom`, or is requeued for recompute if `requeue`."""

    rid: int
    reason: str = "admin"
    requeue: bool = False
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """Shrink or restore limits without a restart; None leaves a limit as it is."""

    kv_fraction: float | None = None
    max_num_seqs: int | None = None
    prefill_chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """Nothing but the lease: a client that posts at least once a second is alive."""


Message = Submit | Cancel | Evict | Limit | Beat


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one finished sequence."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Extra:
    """What only some sequences have in a step. `stop_token` is the id that ended it, if any;
    `error_code` with blocks needed and free after an oom or error. `logprobs` has one entry per
    token of this batch; `prompt_logprobs` starts at prompt position `prompt_start`.
    """

    usage: Usage | None = None
    stop_token: int | None = None
    error_code: str | None = None
    blocks_needed: int = 0
    blocks_free: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_start: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is, sent with every batch."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    step_us: int = 0


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything one client hears of one scheduler step. rids, counts and flags are parallel;
    `tokens` holds counts[0] ids of rids[0], then counts[1] of rids[1], ...
    `seq` counts this client's batches from 0 without a gap, so a lost item is seen.
    """

    seq: int
    time_ns: int
    rids: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    flags: tuple[Flag, ...] = ()
    extra: tuple[tuple[int, Extra], ...] = ()
    load: Load = Load()
    kv_added: tuple[bytes, ...] = ()
    kv_evicted: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Attached:
    """The engine's answer to attach(): who it is and what it can do."""

    engine: str
    epoch: int
    protocol: int
    model: str
    vocab_size: int
    max_model_len: int
    block_tokens: int
    kv_blocks: int
    max_prompt_tokens: int
    eos_token_ids: tuple[int, ...] = ()
