"""The invariants of the KV manager: pool, prefix cache, host tier, the sequences that have blocks.

Changes nothing; for tests and drills.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine_actor.core.blocks import BlockPool
from engine_actor.core.host_tier import HostTier
from engine_actor.core.prefix import NOWHERE, CachedBlock, PrefixCache
from engine_actor.core.sequence import Sequence


def check_kv(
    pool: BlockPool,
    cache: PrefixCache,
    tier: HostTier,
    block_tokens: int,
    sequences: Iterable[Sequence],
) -> None:
    """Raise AssertionError where they disagree. `sequences`: all that may have blocks."""
    holders: Counter[int] = Counter()
    for seq in sequences:
        assert len(set(seq.blocks)) == len(seq.blocks), f"{seq.key} has a block twice"
        assert len(seq.blocks) * block_tokens >= seq.n_scheduled, f"{seq.key} is uncovered"
        assert seq.frozen_blocks in (None, tuple(seq.blocks)), f"{seq.key}: stale blocks"
        holders.update(seq.blocks)
    pool.check()
    idle = {entry.block for entry in cache.idle_entries()}
    for block in range(max([pool.capacity, *(block + 1 for block in holders)])):
        count = pool.references(block)
        assert count == holders[block], f"block {block}: {count} references"
        states = (count > 0) + (block in idle) + pool.is_free(block)
        assert states == (block < pool.capacity or count > 0), f"block {block}: {states}"
    _check_entries(cache, block_tokens, holders)
    tier.check()
    for entry in cache.entries():
        kept = tier.find(entry.digest)
        assert (kept is entry) == (entry.slot != NOWHERE), "an entry has another's slot"
        assert kept in (None, entry), "one digest, two entries"


def _check_entries(cache: PrefixCache, block_tokens: int, holders: Counter[int]) -> None:
    seen: set[CachedBlock] = set()
    for entry in cache.entries():
        assert entry.parent is None or entry.parent in seen, "an entry lost its parent"
        assert cache.of_block(entry.block) is entry, f"block {entry.block}: two entries"
        assert len(entry.tokens) == block_tokens, "a part of a block is cached"
        assert cache.is_idle(entry) == (holders[entry.block] == 0), "idle list is wrong"
        if entry.parent is not None and holders[entry.block]:
            assert holders[entry.parent.block], "a held entry has an idle parent"
        seen.add(entry)
    evicted: set[CachedBlock] = set()
    for entry in cache.idle_entries():
        assert entry.parent not in evicted, "a parent would be evicted before its child"
        evicted.add(entry)
