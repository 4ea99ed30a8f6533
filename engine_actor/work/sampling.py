"""From requests to the sampler's rows. Knows requests and the sampler's face; knows no step."""

from __future__ import annotations

from engine_actor.core.sequence import Sequence
from engine_actor.model.penalties import SampleRow, reads_history


def sample_row(request: Sequence, position: int, eos_token_ids: frozenset[int]) -> SampleRow:
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
