"""The host's memory as a second tier of the prefix cache: which entries have a copy in which slot,
and which copy makes room.

Knows entries and slots; knows no pool, no tensor and no time. A copy stays when its block is
restored, so that the same block is not copied out twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine_actor.core.block_copies import CopyQueue
from engine_actor.core.prefix import NOWHERE, CacheChanges, CachedBlock


class HostTier:
    """Slots 0..n_slots-1, given to entries as they leave the device, taken from the one that was
    kept longest. Without a slot the tier is off.

    Invariant: the parent of an entry that is here alone is on the device or here, and then it was
    kept later. So who makes room is never a parent of one that is here alone, and whoever finds an
    entry has found all before it. It follows from the order of calls: an entry leaves the device
    after its children.
    """

    def __init__(self, n_slots: int, copies: CopyQueue, changes: CacheChanges) -> None:
        self.n_slots = n_slots
        self.n_copied_out = 0
        self.n_copied_back = 0
        self.n_dropped = 0
        self._copies = copies
        self._changes = changes
        self._free = list(range(n_slots - 1, -1, -1))
        self._kept: OrderedDict[bytes, CachedBlock] = OrderedDict()
        self._held: frozenset[CachedBlock] = frozenset()
        self._refused = False

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, digest: bytes) -> CachedBlock | None:
        """The entry of a digest that has a copy here; the caller checks it with holds()."""
        return self._kept.get(digest)

    def keep(self, entry: CachedBlock, block: int | None, urgent: bool) -> bool:
        """An entry leaves the device: note it as the newest here. Without a copy it gets one of
        `block`; None where that may not be read any more. False where it has none and gets none.
        """
        if entry.slot == NOWHERE:
            slot = None if block is None else self._room()
            if block is None or slot is None:
                return False
            entry.slot = slot
            self._kept[entry.digest] = entry
            self._copies.add(block, slot, to_host=True, urgent=urgent)
            self.n_copied_out += 1
        self._kept.move_to_end(entry.digest)
        return True

    @contextmanager
    def holding(self, chain: Sequence[CachedBlock]) -> Iterator[None]:
        """Make the copies of a chain, parents first, the newest; inside none of them makes room,
        so that an entry that leaves the device may find none.
        """
        for entry in reversed(chain):
            self._kept.move_to_end(entry.digest)
        self._held, self._refused = frozenset(chain), False
        yield
        self._held = frozenset()
        if self._refused:
            # A child may have found the last slot, its parent none.
            self.drop_orphans()

    def adopt(
        self, digest: bytes, tokens: tuple[int, ...], parent: CachedBlock | None, salt: str
    ) -> CachedBlock | None:
        """The entry of just this block, which was computed once more. One that has no more than its
        digest makes way: two entries never share one.
        """
        entry = self._kept.get(digest)
        if entry is None or entry.holds(tokens, parent, salt):
            return entry
        self._forget(entry)
        self.drop_orphans()
        return None

    def restore(self, entry: CachedBlock, block: int, urgent: bool) -> None:
        """Ask for the copy of an entry in a block that nobody else has."""
        self._copies.add(block, entry.slot, to_host=False, urgent=urgent)
        self.n_copied_back += 1

    def drop_orphans(self) -> None:
        """Forget the entries whose parent is neither here nor on the device any more."""
        known: dict[CachedBlock, bool] = {}
        for entry in list(self._kept.values()):
            if not _is_alive(entry, known):
                self._forget(entry)

    def clear(self) -> None:
        """Forget all copies."""
        for entry in list(self._kept.values()):
            self._forget(entry)

    def check(self) -> None:
        """Raise AssertionError where slots, entries and their order disagree."""
        used = [entry.slot for entry in self._kept.values()]
        assert sorted(used + self._free) == list(range(self.n_slots)), "a slot is lost or double"
        older: set[CachedBlock] = set()
        for digest, entry in self._kept.items():
            parent = entry.parent
            assert entry.digest == digest, "an entry stands under another digest"
            if entry.block == NOWHERE and parent is not None and parent.block == NOWHERE:
                assert parent.slot != NOWHERE, "an entry lost its parent"
                assert parent not in older, "a parent would be dropped before its child"
            older.add(entry)

    def _room(self) -> int | None:
        if not self._free:
            oldest = next(iter(self._kept.values()), None)
            if oldest is None or oldest in self._held:
                self._refused = True
                return None
            self._forget(oldest)
        return self._free.pop()

    def _forget(self, entry: CachedBlock) -> None:
        del self._kept[entry.digest]
        self._free.append(entry.slot)
        entry.slot = NOWHERE
        self.n_dropped += 1
        if entry.block == NOWHERE:
            self._changes.note(entry.digest, cached=False)


def _is_alive(entry: CachedBlock, known: dict[CachedBlock, bool]) -> bool:
    """Whether every entry up to one on the device, or to the first of all, is kept somewhere."""
    path: list[CachedBlock] = []
    at: CachedBlock | None = entry
    while at is not None and at.block == NOWHERE and at.slot != NOWHERE and at not in known:
        path.append(at)
        at = at.parent
    alive = at is None or at.block != NOWHERE or known.get(at, False)
    known.update(dict.fromkeys(path, alive))
    return alive
