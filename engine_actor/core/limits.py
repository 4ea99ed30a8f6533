"""The scheduler's limits, and whether a request can be served within them at all."""

from __future__ import annotations

from dataclasses import dataclass

from engine_actor.core.params import InvalidParam
from engine_actor.core.sequence import Sequence
from engine_actor.errors import ContextLengthExceeded


@dataclass(frozen=True)
class SchedulerLimits:
    """What one engine takes on. Counts of sequences, tokens a step, seconds.

    `max_partial_prefills`: prompt chunks a step. `prefill_chunk_tokens`: their sum, and
    `prefill_chunk_tokens_while_decoding` the same while a stream decodes (None: no difference).
    `prefill_slice_tokens`: while a stream decodes, a chunk of more tokens goes through the layers
    in ranges, a step each, that take about as long as so many tokens through all `n_layers`.
    `prefill_burst_tokens`: the same while any of a crowd of prompts waits (budget.is_crowd).
    `pipeline_depth`: steps that may be planned before an earlier one is committed, 0 or 1.
    """

    max_num_seqs: int
    max_queue: int
    max_partial_prefills: int
    prefill_chunk_tokens: int
    prefill_chunk_tokens_while_decoding: int | None
    priority_ageing_s: float
    max_model_len: int
    pipeline_depth: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    prefill_slice_tokens: int | None = None
    prefill_burst_tokens: int | None = None
    n_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_queue", "max_partial_prefills", "prefill_chunk_tokens"):
            require_positive(name, getattr(self, name))
        if self.prefill_chunk_tokens_while_decoding is not None:
            require_positive(
                "prefill_chunk_tokens_while_decoding", self.prefill_chunk_tokens_while_decoding
            )
        if self.prefill_slice_tokens is not None:
            require_positive("prefill_slice_tokens", self.prefill_slice_tokens)
        if self.prefill_burst_tokens is not None:
            require_positive("prefill_burst_tokens", self.prefill_burst_tokens)
        if self.priority_ageing_s <= 0:
            raise InvalidParam("priority_ageing_s", "must be above 0")
        if self.pipeline_depth not in (0, 1):
            raise InvalidParam("pipeline_depth", f"must be 0 or 1, got {self.pipeline_depth}")


def require_positive(name: str, value: int) -> None:
    """Raise InvalidParam where a count is below one."""
    if value < 1:
        raise InvalidParam(name, f"must be at least 1, got {value}")


def tokens_needed(seq: Sequence) -> int:
    """Tokens of a whole request: its prompt and the most it may generate."""
    return seq.n_prompt + seq.sampling.max_tokens


def require_servable(seq: Sequence, max_model_len: int, pool_tokens: int) -> None:
    """Refuse at the door what could never end: a request that waits for room which does not exist
    would block the queue behind it. Raises ContextLengthExceeded or InvalidParam.
    """
    if seq.n_prompt < 1:
        raise InvalidParam("prompt", "must have at least one token")
    needed = tokens_needed(seq)
    if needed > max_model_len:
        raise ContextLengthExceeded(f"needs {needed} tokens, the context holds {max_model_len}")
    if needed > pool_tokens:
        raise ContextLengthExceeded(f"needs {needed} tokens, the KV pool holds {pool_tokens}")
