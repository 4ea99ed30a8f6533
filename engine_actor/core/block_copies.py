"""Copies of KV blocks between device and host that plans ask for, in the order in which they take
effect, and which blocks a copy may still be touching.

Knows ids and slots; who decides is the KV manager, who copies the shell (work/host_copies.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class BlockCopy(NamedTuple):
    """`block` of the pool into `slot` of the host (to_host), or back."""

    block: int
    slot: int
    to_host: bool


@dataclass(frozen=True, slots=True)
class CopyList:
    """What one plan asks for, to be made after all works of the plans before it.

    first: on the works' own stream, before this plan's works and before `copies`.
    copies: in this order, beside works that do not wait for them. `ticket`: counts the lists whose
    copies are not empty from 1; it has landed when its copies and those of all earlier ones are
    done. 0: no copies.
    """

    ticket: int = 0
    copies: tuple[BlockCopy, ...] = ()
    first: tuple[BlockCopy, ...] = ()


NO_COPIES = CopyList()
FEW_BLOCKS = 32
"""So many copies at once hold a step up for less than a prompt would wait for them elsewhere."""


class CopyQueue:
    """Gathers copies between two plans. A block that is given to somebody else while a copy may
    touch it has the copy's ticket: no work may touch it before that has landed. few: so many
    copies of one sequence are urgent.
    """

    def __init__(self) -> None:
        self.few = FEW_BLOCKS
        self._next = 1
        self._landed = 0
        self._copies: list[BlockCopy] = []
        self._first: list[BlockCopy] = []
        self._blocks: dict[int, int] = {}
        self._slots: dict[int, int] = {}

    def add(self, block: int, slot: int, to_host: bool, urgent: bool = False) -> None:
        """Ask for one more copy, behind all that were asked for before. Urgent: it does not queue
        where nothing in the queue has to come before it.
        """
        copy = BlockCopy(block, slot, to_host)
        if urgent and block not in self._blocks and slot not in self._slots:
            self._first.append(copy)
            return
        self._copies.append(copy)
        self._blocks[block] = self._slots[slot] = self._next

    def take(self) -> CopyList:
        """What was asked for since the last call."""
        if not self._copies and not self._first:
            return NO_COPIES
        ticket = self._next if self._copies else 0
        taken = CopyList(ticket, tuple(self._copies), tuple(self._first))
        self._next += bool(self._copies)
        self._copies.clear()
        self._first.clear()
        return taken

    @property
    def landed(self) -> int:
        """The last ticket that is known to have landed."""
        return self._landed

    @landed.setter
    def landed(self, ticket: int) -> None:
        if ticket > self._landed:
            self._landed = ticket
            self._blocks = {block: t for block, t in self._blocks.items() if t > ticket}
            self._slots = {slot: t for slot, t in self._slots.items() if t > ticket}

    def ticket_of(self, block: int) -> int:
        """Of the last copy that may still touch `block`; 0 where none does."""
        return self._blocks.get(block, 0)

    def last_ticket_of(self, blocks: Iterable[int]) -> int:
        """The last of their tickets."""
        return max(map(self.ticket_of, blocks), default=0) if self._blocks else 0


def batches(copies: Iterable[BlockCopy]) -> Iterator[tuple[BlockCopy, ...]]:
    """The same copies in parts that go one way and name no block and no slot twice: within a part
    the order does not matter.
    """
    part: list[BlockCopy] = []
    blocks: set[int] = set()
    slots: set[int] = set()
    for copy in copies:
        fits = not part or part[0].to_host == copy.to_host
        if not fits or copy.block in blocks or copy.slot in slots:
            yield tuple(part)
            part, blocks, slots = [], set(), set()
        part.append(copy)
        blocks.add(copy.block)
        slots.add(copy.slot)
    if part:
        yield tuple(part)
