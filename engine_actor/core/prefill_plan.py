"""Which prompts a step computes, and how much of each: one token budget, shared in turns.

Knows sequences and limits; decides nothing about decoded rows, which are in the draft already.
"""

from __future__ import annotations

import sys
from itertools import chain, groupby

from engine_actor.core.budget import (
    is_crowd,
    layers_of_slice,
    prefill_budget,
    share_tokens,
    tokens_beside,
)
from engine_actor.core.draft import StepDraft, chunk_wanted
from engine_actor.core.kv_manager import KVManager
from engine_actor.core.limits import SchedulerLimits
from engine_actor.core.overlap_policy import SERIAL, OverlapPolicy, Sharing, StepFacts
from engine_actor.core.plan import LayerRange, OverlapMode, StepPlan
from engine_actor.core.queue import RankedSequences, aged_level
from engine_actor.core.roster import Roster
from engine_actor.core.sequence import SeqState, Sequence

Ready = tuple[int, Sequence]
"""Aged priority level, and a prompt that may have a chunk."""


def plan_prefill(
    draft: StepDraft,
    roster: Roster,
    limits: SchedulerLimits,
    kv: KVManager,
    policy: OverlapPolicy,
    now: float,
) -> Sharing:
    """Add this step's chunks: aged priority first, then whoever has waited longest for a turn, so
    that nobody starves. Beside decoded rows a prompt waits until the copies into its blocks have
    landed, or the rows would wait with it. Returns how they share the device with those rows.
    """
    block_tokens = kv.block_tokens
    budget = prefill_budget(
        limits.prefill_chunk_tokens, limits.prefill_chunk_tokens_while_decoding, draft.n_decoding
    )
    landed = kv.copies.landed if draft.n_decoding else sys.maxsize
    waiting = _ready(roster, limits, now, landed)
    ready = waiting[: limits.max_partial_prefills]
    if not ready:
        return SERIAL
    sharing = SERIAL
    if draft.n_decoding:
        sharing = policy.choose(_facts(draft, ready, budget))
    slice_tokens = limits.prefill_slice_tokens if draft.n_decoding else None
    if slice_tokens and limits.prefill_burst_tokens and _has_crowd(waiting, draft.n_decoding):
        slice_tokens = max(slice_tokens, limits.prefill_burst_tokens)
        room = _room_for_chunks(draft, budget, slice_tokens, sharing)
        ready = _ending_within(ready, room) or ready
    ranged = _add_range(draft, roster, limits, block_tokens, ready, budget, slice_tokens, sharing)
    if ranged is not None:
        return ranged
    budget = _room_for_chunks(draft, budget, slice_tokens, sharing)
    for _, level in groupby(ready, key=lambda entry: entry[0]):
        group = [seq for _, seq in level]
        wanted = [chunk_wanted(seq) for seq in group]
        for seq, n_tokens in zip(group, share_tokens(wanted, budget), strict=True):
            if n_tokens:
                draft.add_chunk(seq, n_tokens, block_tokens)
                roster.take_turn(seq)
                budget -= n_tokens
    return sharing


def is_early(
    plan: StepPlan, running: RankedSequences, waiting: RankedSequences, limits: SchedulerLimits
) -> bool:
    """Whether a step behind the launched `plan` would be planned too early: that one takes whole
    chunks of more than a slice, long enough for prompts to come that the next step could take, and
    those that are here do not fill a burst.
    """
    slice_tokens, burst_tokens = limits.prefill_slice_tokens, limits.prefill_burst_tokens
    rows = sum(chunk.end - chunk.start for chunk in plan.prefill if chunk.layers is None)
    if slice_tokens is None or burst_tokens is None or rows <= slice_tokens:
        return False
    # It is asked at every look at a long step, so it counts no further than it must.
    n_left = tokens_left = 0
    for seq in chain(waiting, running):
        if seq.state is SeqState.DECODE:
            continue
        tokens = len(seq.tokens) - seq.n_scheduled
        n_left, tokens_left = n_left + (tokens > 0), tokens_left + tokens
        if n_left >= limits.max_partial_prefills or tokens_left >= burst_tokens:
            return False
    return True


def _add_range(
    draft: StepDraft,
    roster: Roster,
    limits: SchedulerLimits,
    block_tokens: int,
    ready: list[Ready],
    budget: int,
    slice_tokens: int | None,
    sharing: Sharing,
) -> Sharing | None:
    """Add the next layers of a chunk that is open, or the first ones of a long chunk beside decoded
    rows; None where this step has none to add. A range is one sequence's alone: nobody's end may
    leave another's layers half done.
    """
    n_layers = limits.n_layers
    seq = next((seq for seq in roster.running if seq.next_layer), None)
    if seq is not None:
        n_tokens = seq.range_end - seq.n_scheduled
    else:
        seq = ready[0][1]
        n_tokens = min(chunk_wanted(seq), budget)
        is_mixed = sharing.mode is OverlapMode.MIXED
        if slice_tokens is None or n_tokens <= slice_tokens or seq.whole_chunks or is_mixed:
            return None
        roster.take_turn(seq)
    # Without a stream to wait for, whatever is left runs at once.
    count = n_layers
    if slice_tokens is not None:
        count = layers_of_slice(slice_tokens, n_tokens, n_layers)
    first = seq.next_layer
    last = min(n_layers, first + count)
    draft.add_chunk(seq, n_tokens, block_tokens, LayerRange(first, last, n_layers))
    # A part of a forward pass cannot be one with the decoded rows.
    return SERIAL if sharing.mode is OverlapMode.MIXED else sharing


def _ready(roster: Roster, limits: SchedulerLimits, now: float, landed: int) -> list[Ready]:
    """Prompts that may have a chunk now, first in turn first; an open range is never left alone."""
    ready = [
        (aged_level(seq, now, limits.priority_ageing_s), seq.turn, seq)
        for seq in roster.running
        if seq.state is SeqState.PREFILL
        and seq.n_scheduled < len(seq.tokens)
        and not seq.stalled
        and (seq.copy_ticket <= landed or seq.next_layer)
    ]
    ready.sort(key=lambda entry: entry[:2])
    return [(level, seq) for level, _, seq in ready]


def _room_for_chunks(
    draft: StepDraft, budget: int, slice_tokens: int | None, sharing: Sharing
) -> int:
    """Prompt tokens of a step that has no range."""
    if slice_tokens is not None:
        budget = min(budget, slice_tokens)
    if sharing.mode is OverlapMode.MIXED:
        budget = tokens_beside(budget, draft.n_decoding)
    return budget


def _has_crowd(waiting: list[Ready], n_decoding: int) -> bool:
    """A crowd is served to its end: its last would wait for slices while all others stream."""
    if is_crowd(len(waiting), n_decoding):
        for _, seq in waiting:
            seq.in_crowd = True
    return any(seq.in_crowd for _, seq in waiting)


def _ending_within(ready: list[Ready], budget: int) -> list[Ready]:
    """Prompts in turn, for as long as all that is left of each fits into `budget` together: cut
    into even shares none of them would end.
    """
    ending: list[Ready] = []
    for level, seq in ready:
        budget -= len(seq.tokens) - seq.n_scheduled
        if budget < 0:
            break
        ending.append((level, seq))
    return ending


def _facts(draft: StepDraft, ready: list[Ready], budget: int) -> StepFacts:
    wanted = sum(chunk_wanted(seq) for _, seq in ready)
    longest = max(draft.longest_context, *(seq.n_scheduled + 1 for _, seq in ready))
    return StepFacts(draft.n_decoding, wanted, budget, longest)
