"""From requests to the sampler's rows, and sampling that is enqueued and read later.

Knows requests and the sampler's face; knows no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import SampledToken
from engine_actor.core.sequence import Sequence as Request
from engine_actor.model.sampler import Sampler, SampleRow


class PendingSample(Protocol):
    """Tokens that the device may still be making."""

    def result(self) -> list[SampledToken]:
        """Wait for them. Raises what sampling raises."""
        ...


@dataclass(frozen=True, slots=True)
class _Sampled:
    tokens: list[SampledToken]

    def result(self) -> list[SampledToken]:
        return self.tokens


def begin(
    sampler: Sampler,
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    token_buffer: torch.Tensor | None,
    slots: Sequence[int],
) -> PendingSample:
    """Sample the rows of `logits`; token i also goes to token_buffer[slots[i]]."""
    tokens = sampler.sample(logits, rows)
    if token_buffer is not None:
        for slot, token in zip(slots, tokens, strict=True):
            token_buffer[slot] = token.token
    return _Sampled(tokens)


def reads_history(sampling: SamplingParams) -> bool:
    """True where the sampling of a request reads the tokens before it."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def sample_row(request: Request, position: int, eos_token_ids: frozenset[int]) -> SampleRow:
    """What the sampler needs of a request to make its token at `position`; the one before it may
    still be in flight. Ids are copied only where a penalty reads them, so that a long context costs
    a plain step nothing."""
    sampling = request.sampling
    penalised = reads_history(sampling)
    banned: tuple[int, ...] = ()
    if position - request.n_prompt < sampling.min_tokens:
        ends = () if sampling.ignore_eos else tuple(eos_token_ids)
        banned = (*sampling.stop_token_ids, *ends)
    return SampleRow(
        key=request.key,
        sampling=sampling,
        prompt_ids=request.tokens[: request.n_prompt] if penalised else (),
        output_ids=request.tokens[request.n_prompt :] if penalised else (),
        position=position,
        banned=banned,
    )
