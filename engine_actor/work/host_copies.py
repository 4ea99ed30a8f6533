"""The copies of KV blocks that plans ask for, put on the device: on a stream of their own, ordered
against the works by two waits.

Knows streams, tickets and the store that copies; knows no sequence and not why a block goes.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

from engine_actor.core.block_copies import CopyList, batches
from engine_actor.model.runner_protocol import BlockStore, Runner
from engine_actor.work.streams import CudaStreams

S = TypeVar("S")


class Copies(Protocol):
    """What the pipeline does with the copies of its plans, in their order."""

    store: BlockStore | None
    """None where the tier is off."""

    @property
    def landed(self) -> int:
        """The last ticket whose copies, and those of all before it, are done."""
        ...

    def begin(self, asked: CopyList) -> None:
        """Put copies on the device, behind all works that are launched and, what is to be first,
        before all that will be.
        """
        ...

    def wait(self, ticket: int) -> None:
        """Let what is launched from now on wait for the copies up to a ticket."""
        ...

    def settle(self) -> None:
        """The same for all copies: the cache is about to move."""
        ...


class DirectCopies:
    """On a CPU a copy is done when its call returns. Without a store nothing is ever asked for."""

    def __init__(self, store: BlockStore | None) -> None:
        self.store = store
        self.landed = 0

    def begin(self, asked: CopyList) -> None:
        for part in (*batches(asked.first), *batches(asked.copies)):
            assert self.store is not None, "copies without a tier"
            self.store.copy(part)
        self.landed = max(self.landed, asked.ticket)

    def wait(self, ticket: int) -> None:
        assert ticket <= self.landed, f"copies up to {ticket} were never begun"

    def settle(self) -> None:
        """Nothing is under way."""


class Mark(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the device has come to it; the host does not wait."""
        ...


class CopyStreams(Protocol[S]):
    """The few verbs of a device's streams that copies need (streams.CudaStreams)."""

    def current(self) -> S: ...

    def wait(self, waiter: S, awaited: S) -> None: ...

    def record(self, stream: S) -> Mark: ...

    def entered(self, stream: S) -> AbstractContextManager[object]: ...


class StreamCopies(Generic[S]):
    """Copies on `stream`, one list behind the other; the few that a step needs first are on the
    caller's.

    The stream waits for the caller's before each list: that one has waited for both work streams of
    the step before, so a block is read after its last write and written after its last read. The
    caller's waits for the copies before a step whose blocks they may touch; both work streams wait
    for the caller's.
    """

    def __init__(self, store: BlockStore, api: CopyStreams[S], stream: S) -> None:
        self.store: BlockStore | None = store
        self._copy = store.copy
        self._api = api
        self._stream = stream
        self._open: deque[tuple[int, Mark]] = deque()
        self._landed = 0

    @property
    def landed(self) -> int:
        while self._open and self._open[0][1].query():
            self._landed = self._open.popleft()[0]
        return self._landed

    def begin(self, asked: CopyList) -> None:
        for part in batches(asked.first):
            self._copy(part)
        if not asked.copies:
            return
        self._api.wait(self._stream, self._api.current())
        with self._api.entered(self._stream):
            for part in batches(asked.copies):
                self._copy(part)
        self._open.append((asked.ticket, self._api.record(self._stream)))

    def wait(self, ticket: int) -> None:
        if ticket > self.landed:
            self.settle()

    def settle(self) -> None:
        if self._open:
            self._api.wait(self._api.current(), self._stream)


def make_copies(runner: Runner, n_slots: int) -> Copies:
    """For a tier of so many slots; 0: none. Raises CheckpointError where the host has no memory."""
    if not n_slots:
        return DirectCopies(None)
    store = runner.host_blocks(n_slots)
    if runner.device.type != "cuda":
        return DirectCopies(store)
    streams = CudaStreams(runner.device)
    # Few blocks that others wait for: they go before those of a long prompt.
    return StreamCopies(store, streams, streams.new_stream(high_priority=True))
