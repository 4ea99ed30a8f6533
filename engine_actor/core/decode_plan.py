"""Who decodes in a step: one position of each sequence that runs, blocks taken for it.

Knows no prompt and no limit. Called by the scheduler only, before prompts get what is left.
"""

from __future__ import annotations

from engine_actor.core.draft import StepDraft
from engine_actor.core.kv_manager import KVManager
from engine_actor.core.roster import Roster
from engine_actor.core.sequence import SeqState, Sequence
from engine_actor.errors import OutOfMemory


def plan_decode(draft: StepDraft, roster: Roster, kv: KVManager) -> None:
    """Add one slot for each decoding sequence, first in rank first: whoever is preempted for room
    is last in rank, so it has no slot yet.
    """
    for seq in tuple(roster.running):
        position = seq.n_scheduled
        # A prefill whose last chunk is still in flight decodes already (pipeline depth 1).
        if seq.state is SeqState.PREFILL and position < len(seq.tokens):
            continue
        if seq.state is SeqState.WAITING or seq.stalled:
            continue
        if position + 1 - seq.n_prompt >= seq.sampling.max_tokens:
            continue
        has_room = len(seq.blocks) * kv.block_tokens > position
        if has_room or _make_room(draft, roster, kv, seq):
            draft.add_slot(seq)


def _make_room(draft: StepDraft, roster: Roster, kv: KVManager, seq: Sequence) -> bool:
    """Give `seq` its next block, preempting from the end of the order. False where it has to wait:
    it was preempted itself, or blocks come back only with a step in flight.
    """
    needed = seq.n_scheduled + 1
    while not kv.grow(seq, needed, urgent=True):
        if roster.leaving:
            draft.short_of_blocks = True
            return False
        victim = roster.running.last
        if victim is seq and len(roster.running) == 1:
            if seq.in_flight:
                # The token that is still on its way may end it well.
                return False
            # It cannot ever go on. The checks at the door exclude this; never wait in silence.
            draft.refuse(seq, OutOfMemory.code, kv.blocks_for(needed), kv.n_free)
            return False
        draft.preempt(victim)
        if victim is seq:
            return False
    return True
