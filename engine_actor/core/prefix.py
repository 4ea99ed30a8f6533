"""The prefix cache: a hash chain of full blocks, checked token by token, evicted oldest first.

Knows block ids only as values; reference counts are the KV manager's. A digest only finds a
candidate: an entry is used only where its tokens and its parent entry are the very ones asked for,
so a collision costs a miss and never gives a wrong block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

NOWHERE = -1
"""Stands for the block or the slot of an entry that has none."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One full block in the cache. `parent` is compared by identity: by induction that checks every
    token before this block, whatever the digests do. block: where it lies on the device; slot:
    where a copy of it lies on the host (host_tier.py). One that is nowhere is forgotten for good.
    """

    digest: bytes
    tokens: tuple[int, ...]
    parent: CachedBlock | None
    salt: str
    block: int
    slot: int = NOWHERE

    def holds(self, tokens: tuple[int, ...], parent: CachedBlock | None, salt: str) -> bool:
        """True where this entry is exactly that block after exactly that prefix."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


class CacheChanges:
    """Which digests came and went, on the device and on the host together."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}

    def note(self, digest: bytes, cached: bool) -> None:
        """It can be found now, or not any more."""
        # An eviction after an addition (or the reverse) in one interval is no change at all.
        if self._changes.pop(digest, cached) is cached:
            self._changes[digest] = cached

    def take(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Net (added, evicted) digests since the last call."""
        changes, self._changes = self._changes, {}
        added = tuple(digest for digest, cached in changes.items() if cached)
        return added, tuple(digest for digest, cached in changes.items() if not cached)


class PrefixCache:
    """Digest -> CachedBlock, and the idle entries (nobody holds their block) oldest first.

    Invariants, kept by the KV manager's order of calls: the parent of an entry is an entry; who
    holds an entry's block holds its parent's too; a parent goes idle after its children, so the
    oldest idle entry never has a child in the cache.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._idle: OrderedDict[int, CachedBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def n_idle(self) -> int:
        """Entries that may be evicted now."""
        return len(self._idle)

    def find(self, digest: bytes) -> CachedBlock | None:
        """The candidate of a digest; the caller checks it with holds()."""
        return self._entries.get(digest)

    def depth(self, digests: Sequence[bytes]) -> int:
        """How many leading digests are cached, by bisection: an entry's parent is always there too.
        A cheap estimate without the token check; only match() may attach blocks.
        """
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            if digests[middle] in self._entries:
                low = middle + 1
            else:
                high = middle
        return low

    def of_block(self, block: int) -> CachedBlock | None:
        """The entry that lives in `block`, if any."""
        return self._by_block.get(block)

    def add(self, entry: CachedBlock) -> None:
        """Enter a held block under a digest that is not taken."""
        self._entries[entry.digest] = entry
        self._by_block[entry.block] = entry

    def move(self, entry: CachedBlock, block: int) -> int:
        """Let an idle entry live in another, held block of equal content. Returns its old block."""
        old = entry.block
        del self._by_block[old], self._idle[old]
        entry.block = block
        self._by_block[block] = entry
        return old

    def mark_idle(self, entry: CachedBlock) -> None:
        """Nobody holds its block any more: the newest of the idle."""
        self._idle[entry.block] = entry

    def mark_held(self, entry: CachedBlock) -> None:
        """Somebody holds its block again."""
        self._idle.pop(entry.block, None)

    def is_idle(self, entry: CachedBlock) -> bool:
        """True where nobody holds its block."""
        return entry.block in self._idle

    def evict_oldest(self) -> CachedBlock:
        """Take out the entry that was idle longest. Raises KeyError if none is."""
        _, entry = self._idle.popitem(last=False)
        self._take_out(entry)
        return entry

    def drop_from(self, first: int) -> list[tuple[CachedBlock, bool]]:
        """Take out every entry in blocks `first` and above, and all that build on one of them:
        (entry, whether it was idle), parents before children.
        """
        doomed: dict[CachedBlock, bool] = {}
        # Entries stand in the order they were added, parents before children.
        for entry in list(self._entries.values()):
            if entry.block >= first or entry.parent in doomed:
                doomed[entry] = self._idle.pop(entry.block, None) is not None
                self._take_out(entry)
        return list(doomed.items())

    def entries(self) -> list[CachedBlock]:
        """All entries, parents before children."""
        return list(self._entries.values())

    def idle_entries(self) -> list[CachedBlock]:
        """The idle entries, next to be evicted first."""
        return list(self._idle.values())

    def _take_out(self, entry: CachedBlock) -> None:
        del self._entries[entry.digest], self._by_block[entry.block]
