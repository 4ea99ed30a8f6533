"""What one scheduler step decided: plain ints, the only thing that leaves the scheduler."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from engine_actor.core.block_copies import NO_COPIES, CopyList
from engine_actor.core.sequence import FinishReason, Key


class OverlapMode(enum.Enum):
    """How the decode and the prefill work of one step share the device."""

    SERIAL = "serial"
    TWO_STREAMS = "two_streams"
    TWO_STREAMS_CAPPED = "two_streams_capped"
    GREEN = "green"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers first..last-1 of `of`: the part of a chunk's forward pass that one step runs."""

    first: int
    last: int
    of: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute positions start..end-1 of one sequence. `samples` is True where end reaches the last
    known token, so the last row's logits give the next token. `tokens` are the ids of those
    positions. `blocks` covers positions 0..end-1. `prompt_logprobs`: all rows' logits are wanted.
    `slot`: where a sampled token goes in the device buffer that the next DecodeSlot may read.
    `layers`: None for all; with the last of them the chunk is computed, before that nothing is.
    """

    key: Key
    start: int
    end: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    samples: bool
    prompt_logprobs: int | None = None
    slot: int = 0
    layers: LayerRange | None = None

    @property
    def ends(self) -> bool:
        """True where this step runs the last layer."""
        return self.layers is None or self.layers.last == self.layers.of


class DecodeSlot(NamedTuple):
    """Compute one position of one sequence and sample the next token.

    `token` is the id at `position`, or None where the previous step that samples it is still in
    flight (pipeline depth 1): the runner then reads it from the device buffer at `slot`.
    """

    key: Key
    position: int
    token: int | None
    blocks: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sequence the scheduler ended by itself (deadline passed, cannot ever fit, evicted)."""

    key: Key
    reason: FinishReason
    code: str
    blocks_needed: int = 0
    blocks_free: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `preempted` sequences went back to waiting; `refused` ones are already DONE.

    `copies` are to be made before its works, and even where it is empty; its works wait for the
    copies up to the ticket `waits_for`.
    """

    step: int
    mode: OverlapMode
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeSlot, ...] = ()
    preempted: tuple[Key, ...] = ()
    refused: tuple[Refusal, ...] = ()
    max_ctas: int | None = None
    copies: CopyList = NO_COPIES
    waits_for: int = 0

    @property
    def empty(self) -> bool:
        """True where there is nothing to launch."""
        return not self.prefill and not self.decode


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of one token and of its best alternatives, best first, as (token, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """One token made for one sequence in one step."""

    key: Key
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """One sequence that a work could not serve. `code` is a stable EngineError code."""

    key: Key
    reason: FinishReason
    code: str
    detail: str = ""
    blocks_needed: int = 0
    blocks_free: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What really happened to a plan: `computed` says up to which position each chunk or slot that
    passed has valid KV; `retry` sequences ran out of memory transiently and stay as they were;
    `rerun` ones passed in a retry, so that what was launched behind the first attempt is void.
    """

    plan: StepPlan
    computed: tuple[tuple[Key, int], ...] = ()
    sampled: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[tuple[Key, int, tuple[TokenLogprobs, ...]], ...] = ()
    failures: tuple[Failure, ...] = ()
    retry: tuple[Key, ...] = ()
    rerun: frozenset[Key] = frozenset()
    logical_overlap: bool = False
    stream_overlap: bool = False
    mixed_forward: bool = False
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    mixed_seconds: float | None = None
    overlapped_seconds: float = 0.0
