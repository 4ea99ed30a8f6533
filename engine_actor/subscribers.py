"""What each client has been sent and may still ask for again: numbered, encoded, bounded.

The engine's thread appends, any number of event loops read. The engine never waits for a reader: a
backlog beyond the bound ends the subscription, as a lost lease does. Knows the batches of the wire;
knows no engine and no transport.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from engine_actor.errors import EngineRestarted
from engine_actor.events import NO_EXTRA, SequenceEvent, StepEvents
from engine_actor.messages import Load, StepBatch, encode_batch

Tell = Callable[[tuple[object, ...]], bool]
"""Gives a reader its next batch on the engine's own thread, without waiting for anything. False
where that cannot be done now; nothing has been given then."""
MAX_QUIET_BLOCKS = 256
"""Changes of the prefix cache that a client with no tokens to hear may miss at most."""


class Subscriber:
    """One client's stream of encoded batches, numbered from 0.

    `backlog`: batches nobody has read yet, beyond which publish() gives up. `replay`: batches that
    were read and are kept, since a reader may die with some of them still on the way.
    """

    def __init__(self, client: str, backlog: int = 4096, replay: int = 1024) -> None:
        self.client = client
        self._backlog = backlog
        self._replay = replay
        self._lock = threading.Lock()
        self._batches: deque[tuple[object, ...]] = deque()
        self._first = 0
        self._read = 0
        self._waiting: set[_Waiter] = set()
        self._closed: str | None = None
        self._blocks: dict[bytes, bool] = {}

    @property
    def next_seq(self) -> int:
        """The number of the next batch."""
        return self._first + len(self._batches)

    @property
    def flushed(self) -> bool:
        """True where everything has been read."""
        return self._read >= self.next_seq

    def publish(self, events: Sequence[SequenceEvent], step: StepEvents) -> bool:
        """Append one batch, or none where it would be empty. False where the backlog is full: the
        client does not read.
        """
        self._note_blocks(step)
        if not events and len(self._blocks) < MAX_QUIET_BLOCKS:
            return True
        added = tuple(digest for digest, is_there in self._blocks.items() if is_there)
        evicted = tuple(digest for digest, is_there in self._blocks.items() if not is_there)
        self._blocks.clear()
        with self._lock:
            if self._closed is not None:
                return False
            encoded = encode_batch(make_batch(self.next_seq, events, step.load, added, evicted))
            self._batches.append(encoded)
            told = self._tell(encoded)
            while self._read - self._first > self._replay:
                self._batches.popleft()
                self._first += 1
            if not told:
                self._wake()
            return self.next_seq - self._read <= self._backlog

    def close(self, why: str) -> None:
        """End every reader with EngineRestarted(why), once it has read what is there."""
        with self._lock:
            self._closed = why
            self._wake()

    def _note_blocks(self, step: StepEvents) -> None:
        """Prefix cache changes wait for the next batch; the last word on a block counts."""
        for digest in step.kv_added:
            self._blocks[digest] = True
        for digest in step.kv_evicted:
            self._blocks[digest] = False

    async def read(
        self, from_seq: int, max_items: int, tell: Tell | None = None
    ) -> AsyncIterator[tuple[object, ...]]:
        """Batches from `from_seq` on, at most `max_items`, without those that `tell` gave while we
        waited: a loop that must wake first, and get the interpreter from the engine's thread, is
        tenths of a millisecond late. Those below are forgotten. Raises EngineRestarted where they
        are gone already, or at the end of the subscription.
        """
        self._forget(from_seq)
        waiter = _Waiter(asyncio.get_running_loop(), from_seq, from_seq + max_items, tell)
        while waiter.seq < waiter.end:
            batch = self._get(waiter)
            if batch is not None:
                waiter.seq += 1
                yield batch
                continue
            try:
                await waiter.event.wait()
            finally:
                with self._lock:
                    self._waiting.discard(waiter)

    def _forget(self, from_seq: int) -> None:
        with self._lock:
            if not self._first <= from_seq <= self.next_seq:
                have = f"{self._first}..{self.next_seq}"
                raise EngineRestarted(f"batch {from_seq} is not among {have} of {self.client}")
            while self._first < from_seq:
                self._batches.popleft()
                self._first += 1
            self._read = max(self._read, from_seq)

    def _get(self, waiter: _Waiter) -> tuple[object, ...] | None:
        """The waiter's next batch, or None with the waiter registered."""
        with self._lock:
            seq = waiter.seq
            if seq < self._first:
                raise EngineRestarted(f"batch {seq} of {self.client} was overtaken")
            if seq < self.next_seq:
                self._read = max(self._read, seq + 1)
                return self._batches[seq - self._first]
            if self._closed is not None:
                raise EngineRestarted(self._closed)
            waiter.event.clear()
            self._waiting.add(waiter)
            return None

    def _tell(self, batch: tuple[object, ...]) -> bool:
        """The only reader, which waits for this batch, is told it here and now if it can be."""
        if len(self._waiting) != 1:
            return False
        (waiter,) = self._waiting
        # The last one goes by the reader, which ends behind it.
        if waiter.tell is None or waiter.seq + 1 >= waiter.end or not waiter.tell(batch):
            return False
        self._read = waiter.seq = waiter.seq + 1
        return True

    def _wake(self) -> None:
        for waiter in self._waiting:
            waiter.wake()
        self._waiting.clear()


class _Waiter:
    """One reader asleep in its own event loop; each Ray concurrency group has a loop of its own.
    seq, end: of its next batch, and behind its last."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seq: int, end: int, tell: Tell | None
    ) -> None:
        self._loop = loop
        self.seq = seq
        self.end = end
        self.tell = tell
        self.event = asyncio.Event()

    def wake(self) -> None:
        # RuntimeError: the loop is closed, so nobody waits there any more.
        try:
            self._loop.call_soon_threadsafe(self.event.set)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


def make_batch(
    seq: int,
    events: Sequence[SequenceEvent],
    load: Load,
    kv_added: tuple[bytes, ...] = (),
    kv_evicted: tuple[bytes, ...] = (),
) -> StepBatch:
    """One client's share of a step."""
    tokens: list[int] = []
    for event in events:
        tokens.extend(event.tokens)
    return StepBatch(
        seq=seq,
        time_ns=time.time_ns(),
        rids=tuple(event.rid for event in events),
        counts=tuple(len(event.tokens) for event in events),
        tokens=tuple(tokens),
        flags=tuple(event.flag for event in events),
        extra=tuple((event.rid, event.extra) for event in events if event.extra is not NO_EXTRA),
        load=load,
        kv_added=kv_added,
        kv_evicted=kv_evicted,
    )
