"""Edits of the logits that depend on a sequence's own text: bias, penalties, banned ids.

Knows no temperature and draws nothing. Each row is edited by itself, through a view of that row
only, with operations that are exact to the last bit whatever stands beside it; so a row is the same
alone and in a batch, and an id can never touch a neighbour's row.

Order, as in vLLM's V1 sampler: logit_bias, then repetition, then frequency and presence penalty,
then the bans. Presence and frequency look at the output only (OpenAI's definition); repetition at
prompt and output, once for each distinct id (Keskar et al., "CTRL", 2019).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from engine_actor.core.params import SamplingParams
from engine_actor.core.sequence import Key

_LARGEST = 1e30
"""No edit makes a logit larger. Divided by the smallest temperature it is still finite in fp32; an
infinite one would turn the whole row into NaN."""


class SampleRow(NamedTuple):
    """One row of logits that becomes one token.

    prompt_ids and output_ids: everything before this token. `position` is the index of the token
    being made, len(prompt_ids) + len(output_ids). `banned`: ids not allowed now (eos and stop ids
    before min_tokens is reached).
    """

    key: Key
    sampling: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    position: int
    banned: Sequence[int] = ()


def is_edited(row: SampleRow) -> bool:
    """True where edit() would change the row's logits."""
    sampling = row.sampling
    return bool(row.banned or sampling.logit_bias or needs_history(row))


def needs_history(row: SampleRow) -> bool:
    """True where edit() reads the ids before the row's token: all of them must be known."""
    return reads_history(row.sampling)


def reads_history(sampling: SamplingParams) -> bool:
    """needs_history() of every row of a request."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


def edit(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Apply every row's edits to a copy of fp32 logits [R, V]; without any edit, the tensor itself.

    Ids outside 0..V-1 are passed over: the door refuses them (`require_vocabulary`), and a bug
    there must not reach another row or end the engine.
    """
    edited = [index for index, row in enumerate(rows) if is_edited(row)]
    if not edited:
        return logits
    logits = logits.clone()
    for index in edited:
        _edit_row(logits[index], rows[index])
    return logits


def _edit_row(logits: torch.Tensor, row: SampleRow) -> None:
    """In place on one row's view [V]."""
    sampling = row.sampling
    if sampling.logit_bias:
        ids, bias = _known(dict(sampling.logit_bias), logits)
        logits[ids] += bias
    if sampling.repetition_penalty != 1.0:
        strength = max(sampling.repetition_penalty, 1 / _LARGEST)
        ids, _ = _known(dict.fromkeys([*row.prompt_ids, *row.output_ids], 0.0), logits)
        seen = logits[ids]
        scaled = torch.where(seen > 0, seen / strength, seen * strength)
        logits[ids] = scaled.clamp(max=_LARGEST)
    if row.output_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = _known(Counter(row.output_ids), logits)
        logits[ids] -= counts * sampling.frequency_penalty + sampling.presence_penalty
    if row.banned:
        ids, _ = _known(dict.fromkeys(row.banned, 0.0), logits)
        logits[ids] = -torch.inf


def _known(numbers: Mapping[int, float], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct ids inside the vocabulary and their numbers, as tensors beside the logits."""
    vocab = logits.shape[0]
    pairs = {token: number for token, number in numbers.items() if 0 <= token < vocab}
    return (
        torch.tensor(list(pairs), dtype=torch.int64, device=logits.device),
        torch.tensor(list(pairs.values()), dtype=torch.float32, device=logits.device),
    )
