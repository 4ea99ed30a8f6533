"""Which KV blocks a sequence has: attach cached ones, grow, register, release, shrink.

Knows no tensors and no schedule. Only full blocks are shared and a shared block is never written:
new tokens go to positions that no other sequence has. Called by the scheduler only.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from engine_actor.core.blocks import BlockPool
from engine_actor.core.prefix import CachedBlock, Digest, PrefixCache, chain_digest, root_digest
from engine_actor.core.sequence import Sequence


class KVManager:
    """Paged KV bookkeeping of one engine. Only tests replace `digest`, to force collisions."""

    def __init__(
        self,
        n_blocks: int,
        block_tokens: int,
        prefix_cache: bool = True,
        digest: Digest = chain_digest,
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"a block needs at least one token, got {block_tokens}")
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self._digest = digest
        self._pool = BlockPool(n_blocks)
        self._cache = PrefixCache()

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
            self._extend_hashes(seq, depth + 1)
            depth += self._cache.find(seq.block_hashes[depth]) is not None
        return min(depth, self.shareable_blocks(seq))

    def digest_of(self, seq: Sequence, index: int) -> bytes | None:
        """Of a block and all before it; None where the tokens do not fill it."""
        if (index + 1) * self.block_tokens > len(seq.tokens):
            return None
        self._extend_hashes(seq, index + 1)
        return seq.block_hashes[index]

    def match(self, seq: Sequence) -> int:
        """Attach the longest cached prefix to a sequence without blocks. Sets its n_computed,
        n_scheduled and n_cached, and returns that number of tokens (at most len(tokens) - 1).
        """
        if seq.blocks:
            raise ValueError(f"{seq.key} has blocks already")
        parent: CachedBlock | None = None
        for index in range(self.shareable_blocks(seq)):
            self._extend_hashes(seq, index + 1)
            entry = self._cache.find(seq.block_hashes[index])
            if entry is None or not entry.holds(self._tokens_of(seq, index), parent, seq.salt):
                break
            self._pool.hold(entry.block)
            self._cache.mark_held(entry)
            seq.blocks.append(entry.block)
            parent = entry
        seq.frozen_blocks = None
        seq.n_registered = len(seq.blocks)
        seq.n_computed = seq.n_scheduled = seq.n_cached = len(seq.blocks) * self.block_tokens
        return seq.n_cached

    def grow(self, seq: Sequence, n_tokens: int) -> bool:
        """Make the blocks of `seq` cover positions 0..n_tokens-1, evicting idle cached blocks where
        needed. False where the pool is too small for it; nothing has changed then.
        """
        missing = self.blocks_for(n_tokens) - len(seq.blocks)
        if missing <= 0:
            return True
        if missing > self.n_free:
            return False
        while self._pool.n_free < missing:
            self._pool.put_back(self._cache.evict_oldest())
        seq.blocks.extend(self._pool.take() for _ in range(missing))
        seq.frozen_blocks = None
        return True

    def register(self, seq: Sequence) -> None:
        """Enter the newly full, computed blocks of `seq` into the prefix cache."""
        full = seq.n_computed // self.block_tokens
        index = seq.n_registered
        if full <= index or not self.prefix_cache:
            return
        seq.n_registered = full
        self._extend_hashes(seq, full)
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
        seq.n_computed = seq.n_scheduled = seq.n_registered = 0

    def resize(self, n_blocks: int) -> None:
        """Change the capacity at once. After a shrink, sequences that hold blocks at or above it
        keep them until released (see holds_tail()); cached ones there are forgotten.
        """
        if n_blocks < self.capacity:
            for block in self._cache.drop_from(n_blocks):
                self._pool.put_back(block)
        self._pool.resize(n_blocks)

    def holds_tail(self, seq: Sequence) -> bool:
        """True where `seq` has a block that a shrink wants back."""
        return bool(seq.blocks) and max(seq.blocks) >= self.capacity

    def reset_prefix_cache(self) -> None:
        """Forget every cached block. Running sequences keep theirs, unshared from now on."""
        for block in self._cache.drop_from(0):
            self._pool.put_back(block)

    def take_events(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Net (added, evicted) block digests since the last call."""
        return self._cache.take_changes()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Prove the invariants; `sequences` are all that may have blocks. Raises AssertionError."""
        holders: Counter[int] = Counter()
        for seq in sequences:
            assert len(set(seq.blocks)) == len(seq.blocks), f"{seq.key} has a block twice"
            assert len(seq.blocks) * self.block_tokens >= seq.n_scheduled, f"{seq.key} is uncovered"
            assert seq.frozen_blocks in (None, tuple(seq.blocks)), f"{seq.key}: stale blocks"
            holders.update(seq.blocks)
        self._pool.check()
        entries = self._cache.entries()
        idle = {entry.block for entry in self._cache.idle_entries()}
        for block in range(max([self.capacity, *(block + 1 for block in holders)])):
            count = self._pool.references(block)
            assert count == holders[block], f"block {block}: {count} references"
            states = (count > 0) + (block in idle) + self._pool.is_free(block)
            assert states == (block < self.capacity or count > 0), f"block {block}: {states}"
        self._check_entries(entries, holders)

    def _check_entries(self, entries: list[CachedBlock], holders: Counter[int]) -> None:
        seen: set[CachedBlock] = set()
        for entry in entries:
            assert entry.parent is None or entry.parent in seen, "an entry lost its parent"
            assert self._cache.of_block(entry.block) is entry, f"block {entry.block}: two entries"
            assert len(entry.tokens) == self.block_tokens, "a part of a block is cached"
            assert self._cache.is_idle(entry) == (holders[entry.block] == 0), "idle list is wrong"
            if entry.parent is not None and holders[entry.block]:
                assert holders[entry.parent.block], "a held entry has an idle parent"
            seen.add(entry)
        evicted: set[CachedBlock] = set()
        for entry in self._cache.idle_entries():
            assert entry.parent not in evicted, "a parent would be evicted before its child"
            evicted.add(entry)

    def _enter(self, seq: Sequence, index: int, parent: CachedBlock | None) -> CachedBlock | None:
        """Cache one computed block. None ends the chain: a block whose parent is not the cached one
        must not be cached, or its parent could be evicted before it.
        """
        block, tokens = seq.blocks[index], self._tokens_of(seq, index)
        if block >= self.capacity:
            return None
        entry = self._cache.find(seq.block_hashes[index])
        if entry is None:
            entry = CachedBlock(seq.block_hashes[index], tokens, parent, seq.salt, block)
            self._cache.add(entry)
            return entry
        if not entry.holds(tokens, parent, seq.salt):
            return None
        if entry.block != block:
            if not self._cache.is_idle(entry):
                return None
            self._pool.put_back(self._cache.move(entry, block))
        return entry

    def _tokens_of(self, seq: Sequence, index: int) -> tuple[int, ...]:
        return tuple(seq.tokens[index * self.block_tokens : (index + 1) * self.block_tokens])

    def _extend_hashes(self, seq: Sequence, n_blocks: int) -> None:
        hashes, size = seq.block_hashes, self.block_tokens
        first = len(hashes)
        if first >= n_blocks:
            return
        digest = hashes[-1] if hashes else root_digest(seq.salt)
        tokens = array("q", seq.tokens[first * size : n_blocks * size])
        for start in range(0, len(tokens), size):
            digest = self._digest(digest, tokens[start : start + size])
            hashes.append(digest)
