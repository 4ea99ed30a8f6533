"""How cached blocks leave the device: the idle ones, oldest first, for somebody who needs room, and
those above a pool that shrinks. The host tier keeps what it takes of them.

Knows no sequence. Called by the KV manager only.
"""

from __future__ import annotations

from engine_actor.core.block_copies import CopyQueue
from engine_actor.core.blocks import BlockPool
from engine_actor.core.host_tier import HostTier
from engine_actor.core.prefix import NOWHERE, CacheChanges, CachedBlock, PrefixCache


class Eviction:
    """Takes entries out of the cache and gives their blocks back to the pool."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        tier: HostTier,
        copies: CopyQueue,
        changes: CacheChanges,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._tier = tier
        self._copies = copies
        self._changes = changes

    def make_free(self, count: int, urgent: bool = False) -> None:
        """Evict until the pool has so many blocks free, or none is left to evict. urgent: a step
        that is being planned writes them.
        """
        urgent = urgent or count - self._pool.n_free <= self._copies.few
        while self._pool.n_free < count and self._cache.n_idle:
            entry = self._cache.evict_oldest()
            block = entry.block
            self._leave_device(entry, block, urgent)
            self._pool.put_back(block)

    def drop_from(self, first: int) -> None:
        """Take blocks `first` and above out of the cache, and all that builds on them. The host
        keeps what it has; nothing is copied, as that memory may be gone before the copy is made.
        """
        for entry, is_idle in reversed(self._cache.drop_from(first)):
            block = entry.block
            self._leave_device(entry, None)
            if is_idle:
                self._pool.put_back(block)
        self._tier.drop_orphans()

    def _leave_device(self, entry: CachedBlock, readable: int | None, urgent: bool = False) -> None:
        entry.block = NOWHERE
        if not self._tier.keep(entry, readable, urgent):
            self._changes.note(entry.digest, cached=False)
