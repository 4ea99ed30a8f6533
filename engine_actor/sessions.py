"""The clients of one engine: their leases, their posts, their subscriptions.

Knows no transport. Any event loop's thread may call; the engine's thread publishes and expires.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine_actor.core.clock import Clock
from engine_actor.errors import EngineRestarted
from engine_actor.events import StepEvents
from engine_actor.subscribers import Subscriber

Rejected = list[tuple[int, str]]
KEPT_REPLIES = 16
"""More than a client has posts in flight."""


@dataclass(slots=True)
class Session:
    """One attachment of one client. `first_seq`: posts with smaller numbers were meant for an
    earlier one. `last_seq`: its newest post. `replies`: of the newest ones, so that a post that is
    asked again is answered and not run again.
    """

    subscriber: Subscriber
    seen: float
    first_seq: int = 0
    last_seq: int = -1
    replies: dict[int, Future[Rejected]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, seq: int, reply: Future[Rejected]) -> None:
        """Of the newest post; under the lock."""
        self.last_seq = seq
        self.replies[seq] = reply
        if len(self.replies) > KEPT_REPLIES:
            del self.replies[min(self.replies)]

    def waits(self) -> bool:
        """Whether a post has not been answered."""
        with self.lock:
            return not all(reply.done() for reply in self.replies.values())


class Sessions:
    """Sessions by client name."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, client: str, first_seq: int = 0) -> None:
        """A new session; an older one of the same client ends."""
        session = Session(Subscriber(client), self._clock.now(), first_seq)
        with self._lock:
            old = self._sessions.get(client)
            self._sessions[client] = session
        if old is not None:
            old.subscriber.close(f"{client} has attached again")

    def get(self, client: str) -> Session:
        """The session, its lease renewed. Raises EngineRestarted where there is none: whatever the
        client had here is gone, and it must attach again.
        """
        session = self._sessions.get(client)
        if session is None:
            raise EngineRestarted(f"{client} is not attached")
        session.seen = self._clock.now()
        return session

    def require(self, client: str, session: Session) -> None:
        """Raise EngineRestarted where `session` is not the client's present one. Its post is about
        to be answered: from here on it may be silent for a lease.
        """
        if self._sessions.get(client) is not session:
            raise EngineRestarted(f"{client} has another session now")
        session.seen = self._clock.now()

    def publish(self, step: StepEvents) -> list[str]:
        """Give each client its share. Returns those whose backlog is full; they are closed."""
        return [
            client
            for client, session in self._snapshot()
            if not session.subscriber.publish(step.by_client.get(client, ()), step)
            and self._close(client, session, f"{client} does not read its events")
        ]

    def expire(self) -> list[str]:
        """Close the sessions that were silent for longer than the lease, and name them. Who waits
        for our answer is not silent, however long a step takes.
        """
        limit = self._clock.now() - self._lease_s
        return [
            client
            for client, session in self._snapshot()
            if session.seen < limit
            and not session.waits()
            and self._close(client, session, f"{client} lost its lease")
        ]

    def end_all(self, why: str) -> None:
        """Readers hear what is still there, then EngineRestarted(why)."""
        for _, session in self._snapshot():
            session.subscriber.close(why)

    def flushed(self) -> bool:
        """True where every client has read everything."""
        return all(session.subscriber.flushed for _, session in self._snapshot())

    def _snapshot(self) -> list[tuple[str, Session]]:
        with self._lock:
            return list(self._sessions.items())

    def _close(self, client: str, session: Session, why: str) -> bool:
        session.subscriber.close(why)
        with self._lock:
            if self._sessions.get(client) is not session:
                return False
            del self._sessions[client]
        return True
