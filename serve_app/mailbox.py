"""Messages gather here while a post is in flight: natural batching, order kept.

Knows nothing of posts or engines. Belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_actor.messages import Message, Submit


class Mailbox:
    """An ordered box of messages. A submit that is still inside can be withdrawn, so a request
    whose client left early never reaches the engine.
    """

    def __init__(self) -> None:
        self._messages: dict[int, Message] = {}
        self._submits: dict[int, int] = {}
        self._next = 0
        self.on_put: Callable[[], None] | None = None
        """Called by put(), before anything else runs: a task that is woken for a message runs
        behind all that is ready now, and in a burst of requests that is every one of them."""

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, *messages: Message) -> None:
        """Append messages and tell whoever takes them."""
        for message in messages:
            self._messages[self._next] = message
            if isinstance(message, Submit):
                self._submits[message.rid] = self._next
            self._next += 1
        if messages and self.on_put is not None:
            self.on_put()

    def withdraw(self, rid: int) -> bool:
        """Remove the submit of `rid` if it has not been taken yet. False where it has."""
        place = self._submits.pop(rid, None)
        if place is None:
            return False
        del self._messages[place]
        return True

    def clear(self) -> None:
        """Drop everything: the engine it was meant for is gone."""
        self._messages.clear()
        self._submits.clear()

    def take(self) -> list[Message]:
        """All messages in order."""
        taken = list(self._messages.values())
        self.clear()
        return taken
