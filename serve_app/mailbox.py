"""Messages gather here while a post is in flight: natural batching, order kept.

Knows nothing of posts or engines. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio

from engine_actor.messages import Message, Submit


class Mailbox:
    """An ordered box of messages. A submit that is still inside can be withdrawn, so a request
    whose client left early never reaches the engine.
    """

    def __init__(self) -> None:
        self._messages: dict[int, Message] = {}
        self._submits: dict[int, int] = {}
        self._next = 0
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Append one message and wake the taker."""
        self._messages[self._next] = message
        if isinstance(message, Submit):
            self._submits[message.rid] = self._next
        self._next += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

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

    async def take(self, at_most_s: float) -> list[Message]:
        """All messages in order, waiting for the first one; an empty list after `at_most_s`."""
        if not self._messages:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(at_most_s, _resolve, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        taken = list(self._messages.values())
        self.clear()
        return taken


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
