"""Which waiting sequences start now: in rank order, with room to grow, without computing a prefix
twice. Knows no chunks and no tokens of a step.
"""

from __future__ import annotations

from engine_actor.core.kv_manager import KVManager
from engine_actor.core.roster import Roster
from engine_actor.core.sequence import SeqState, Sequence

MAX_HELD_LOOKED_AT = 64
"""Bounds the cost of one plan when a long queue waits for one shared prefix."""


def admit(roster: Roster, kv: KVManager, max_num_seqs: int, now: float) -> None:
    """Start waiting sequences. The first in rank that does not fit stops all behind it, or a stream
    of small requests would starve a large one; only those that wait for a running prefill of their
    own prefix are passed by, which ends with that prefill.
    """
    prefilling = [seq for seq in roster.running if seq.state is SeqState.PREFILL]
    n_held = 0
    for seq in tuple(roster.waiting):
        if len(roster.running) >= max_num_seqs:
            return
        if seq.in_flight:
            continue
        depth = kv.cached_depth(seq)
        if _is_computed_elsewhere(seq, depth, prefilling, kv):
            n_held += 1
            if n_held == MAX_HELD_LOOKED_AT:
                return
            continue
        if not _start(seq, depth, roster, kv, now):
            return
        prefilling.append(seq)


def _start(seq: Sequence, depth: int, roster: Roster, kv: KVManager, now: float) -> bool:
    """Attach cached blocks, take the rest of the prompt's, start. False where they are not there.

    All blocks of the prompt are taken now: partial prefills that each hold a part of the pool and
    wait for the rest would have to preempt one another. One more block is left for each running
    sequence, or the newcomer would be preempted again within a block's time.
    """
    headroom = len(roster.running)
    if kv.blocks_for(len(seq.tokens)) - depth + headroom > kv.n_free:
        return False
    cached_before = seq.n_cached
    kv.match(seq)
    if not kv.grow(seq, len(seq.tokens)) or kv.n_free < headroom:
        kv.release(seq)
        seq.n_cached = cached_before
        return False
    if seq.admitted_at is not None:
        # What a preempted sequence finds again is its own work, not a saving to report.
        seq.n_cached = cached_before
    roster.start(seq, now)
    return True


def _is_computed_elsewhere(
    seq: Sequence, depth: int, prefilling: list[Sequence], kv: KVManager
) -> bool:
    """True where the first block that `seq` lacks and could share is being computed right now, by
    one that is served before it: an urgent request does not wait for an idle one's prefill.
    """
    if depth >= kv.shareable_blocks(seq):
        return False
    digest = kv.digests.of(seq, depth)
    end = (depth + 1) * kv.block_tokens
    return any(
        other.rank < seq.rank and other.n_computed < end and kv.digests.of(other, depth) == digest
        for other in prefilling
    )
