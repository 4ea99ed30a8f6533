"""Which KV blocks a sequence has: attach cached ones, restore those that the host keeps, grow,
register, release, shrink.

Knows no tensors and no schedule. Only full blocks are shared and a shared block is never written:
new tokens go to positions that no other sequence has. Called by the scheduler only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from engine_actor.core.block_copies import CopyQueue
from engine_actor.core.blocks import BlockPool
from engine_actor.core.digests import BlockDigests, Digest, chain_digest
from engine_actor.core.eviction import Eviction
from engine_actor.core.host_tier import HostTier
from engine_actor.core.kv_check import check_kv
from engine_actor.core.prefix import CacheChanges, CachedBlock, PrefixCache
from engine_actor.core.sequence import Sequence


class KVManager:
    """Paged KV bookkeeping of one engine. host_slots: blocks that the host keeps, 0 for none. Only
    tests replace `digest`, to force collisions. in_memory: the device has memory for the blocks
    below it; into none above is anything restored, as that memory may never come.
    """

    def __init__(
        self,
        n_blocks: int,
        block_tokens: int,
        prefix_cache: bool = True,
        host_slots: int = 0,
        digest: Digest = chain_digest,
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"a block needs at least one token, got {block_tokens}")
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self.digests = BlockDigests(block_tokens, digest)
        self._pool = BlockPool(n_blocks)
        self._cache = PrefixCache()
        self._changes = CacheChanges()
        self.copies = CopyQueue()
        self.tier = HostTier(host_slots if prefix_cache else 0, self.copies, self._changes)
        self._eviction = Eviction(self._pool, self._cache, self.tier, self.copies, self._changes)
        self.in_memory = sys.maxsize

    @property
    def capacity(self) -> int:
        """Blocks that may be in use."""
        return self._pool.capacity

    @property
    def n_free(self) -> int:
        """Blocks that grow() can still give out: the free and the evictable."""
        return self._pool.n_free + self._cache.n_idle

    @property
    def n_cached(self) -> int:
        """Cached blocks that nobody holds (all of them evictable)."""
        return self._cache.n_idle

    @property
    def extent(self) -> int:
        """The smallest n such that every block with content is below n."""
        return self._pool.extent

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that cover n_tokens positions."""
        return -(-n_tokens // self.block_tokens)

    def shareable_blocks(self, seq: Sequence) -> int:
        """Most leading blocks that `seq` may take from the cache: full ones, and at least one token
        is left to compute, since its logits are wanted. 0 for a request that scores its prompt.
        """
        if not self.prefix_cache or seq.sampling.prompt_logprobs is not None:
            return 0
        return (len(seq.tokens) - 1) // self.block_tokens

    def cached_depth(self, seq: Sequence) -> int:
        """Leading blocks that match() would probably attach. Changes nothing but seq.block_hashes,
        which reach the first block that is missing: a prompt that nobody has sent before costs one
        digest here, and the others when it is computed. O(log n) after the first call.
        """
        if not self.prefix_cache:
            return 0
        full = len(seq.tokens) // self.block_tokens
        depth = self._cache.depth(seq.block_hashes)
        while depth == len(seq.block_hashes) < full:
            self.digests.extend(seq, depth + 1)
            depth += self._cache.find(seq.block_hashes[depth]) is not None
        return min(depth, self.shareable_blocks(seq))

    def match(self, seq: Sequence) -> int:
        """Attach the longest cached prefix to a sequence without blocks, what the host keeps of it
        in fresh blocks. Sets its n_computed, n_scheduled and n_cached, and returns that number of
        tokens (at most len(tokens) - 1).
        """
        if seq.blocks:
            raise ValueError(f"{seq.key} has blocks already")
        parent: CachedBlock | None = None
        shareable = self.shareable_blocks(seq)
        for index in range(shareable):
            self.digests.extend(seq, index + 1)
            entry = self._cache.find(seq.block_hashes[index])
            if entry is None or not entry.holds(self.digests.tokens(seq, index), parent, seq.salt):
                break
            self._pool.hold(entry.block)
            self._cache.mark_held(entry)
            self._attach(seq, [entry.block])
            parent = entry
        self._restore(seq, parent, shareable)
        seq.frozen_blocks = None
        seq.n_registered = len(seq.blocks)
        seq.n_computed = seq.n_scheduled = seq.n_cached = len(seq.blocks) * self.block_tokens
        return seq.n_cached

    def grow(self, seq: Sequence, n_tokens: int, urgent: bool = False) -> bool:
        """Make the blocks of `seq` cover positions 0..n_tokens-1, evicting idle cached blocks where
        needed. False where the pool is too small for it; nothing has changed then. urgent: a step
        that is being planned writes them.
        """
        missing = self.blocks_for(n_tokens) - len(seq.blocks)
        if missing <= 0:
            return True
        if missing > self.n_free:
            return False
        self._eviction.make_free(missing, urgent)
        self._attach(seq, self._pool.take_many(missing))
        seq.frozen_blocks = None
        return True

    def register(self, seq: Sequence) -> None:
        """Enter the newly full, computed blocks of `seq` into the prefix cache."""
        full = seq.n_computed // self.block_tokens
        index = seq.n_registered
        if full <= index or not self.prefix_cache:
            return
        seq.n_registered = full
        self.digests.extend(seq, full)
        parent = self._cache.of_block(seq.blocks[index - 1]) if index else None
        while index < full and (parent is not None or index == 0):
            parent = self._enter(seq, index, parent)
            index += 1

    def release(self, seq: Sequence) -> None:
        """Drop all references of `seq`; registered blocks stay evictable. Raises RuntimeError while
        a launched work may still touch them.
        """
        if seq.in_flight:
            raise RuntimeError(f"{seq.key} has {seq.in_flight} works in flight")
        # Last block first: children go idle before their parents, so they are evicted before them.
        for block in reversed(seq.blocks):
            if self._pool.drop(block):
                entry = self._cache.of_block(block)
                if entry is None:
                    self._pool.put_back(block)
                else:
                    self._cache.mark_idle(entry)
        seq.blocks.clear()
        seq.frozen_blocks = None
        seq.n_computed = seq.n_scheduled = seq.n_registered = seq.copy_ticket = 0

    def resize(self, n_blocks: int) -> None:
        """Change the capacity at once. After a shrink, sequences that hold blocks at or above it
        keep them until released (see holds_tail()); cached ones there are forgotten.
        """
        if n_blocks < self.capacity:
            self._eviction.drop_from(n_blocks)
        self._pool.resize(n_blocks)

    def holds_tail(self, seq: Sequence) -> bool:
        """True where `seq` has a block that a shrink wants back."""
        return bool(seq.blocks) and max(seq.blocks) >= self.capacity

    def reset_prefix_cache(self) -> None:
        """Forget every cached block, the host's too. Running sequences keep theirs, unshared from
        now on.
        """
        self._eviction.drop_from(0)
        self.tier.clear()

    def take_events(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Net (added, evicted) block digests since the last call; one that the host keeps is not
        evicted.
        """
        return self._changes.take()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Prove the invariants; `sequences` are all that may have blocks. Raises AssertionError."""
        check_kv(self._pool, self._cache, self.tier, self.block_tokens, sequences)

    def _enter(self, seq: Sequence, index: int, parent: CachedBlock | None) -> CachedBlock | None:
        """Cache one computed block. None ends the chain: a block whose parent is not the cached one
        must not be cached, or its parent could be evicted before it.
        """
        block, tokens = seq.blocks[index], self.digests.tokens(seq, index)
        if block >= self.capacity:
            return None
        digest = seq.block_hashes[index]
        entry = self._cache.find(digest)
        if entry is None:
            # Computed once more all the same: what builds on the host's copy builds on this.
            entry = self.tier.adopt(digest, tokens, parent, seq.salt)
            if entry is None:
                entry = CachedBlock(digest, tokens, parent, seq.salt, block)
                self._changes.note(digest, cached=True)
            entry.block = block
            self._cache.add(entry)
            return entry
        if not entry.holds(tokens, parent, seq.salt):
            return None
        if entry.block != block:
            if not self._cache.is_idle(entry):
                return None
            self._pool.put_back(self._cache.move(entry, block))
        return entry

    def _restore(self, seq: Sequence, parent: CachedBlock | None, shareable: int) -> None:
        """Attach fresh blocks for the entries that come next and that the host keeps, parents
        first, and ask for the copies into them.
        """
        found: list[CachedBlock] = []
        for index in range(len(seq.blocks), shareable):
            self.digests.extend(seq, index + 1)
            entry = self.tier.find(seq.block_hashes[index])
            if entry is None or not entry.holds(self.digests.tokens(seq, index), parent, seq.salt):
                break
            found.append(entry)
            parent = entry
        urgent = len(found) <= self.copies.few
        with self.tier.holding(found):
            self._eviction.make_free(len(found))
        for entry in found[: self._pool.n_free]:
            block = self._pool.take()
            if block >= self.in_memory:
                self._pool.drop(block)
                self._pool.put_back(block)
                return
            entry.block = block
            self._cache.add(entry)
            self.tier.restore(entry, block, urgent)
            self._attach(seq, [block])

    def _attach(self, seq: Sequence, blocks: list[int]) -> None:
        seq.blocks += blocks
        seq.copy_ticket = max(seq.copy_ticket, self.copies.last_ticket_of(blocks))
