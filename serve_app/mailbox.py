"""Messages gather here while a post is in flight: natural batching, order kept.

Knows nothing of posts or engines. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from engine_actor.messages import Message, Submit

T = TypeVar("T")


class Mailbox:
    """An ordered box of messages. A submit that is still inside can be withdrawn, so a request
    whose client left early never reaches the engine.
    """

    def __init__(self) -> None:
        self._messages: dict[int, Message] = {}
        self._submits: dict[int, int] = {}
        self._next = 0
        self._waiter: asyncio.Future[Any] | None = None
        self._begin: Callable[[list[Message]], Any] = list

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, *messages: Message) -> None:
        """Append messages; where a taker waits, it has them before this returns."""
        for message in messages:
            self._messages[self._next] = message
            if isinstance(message, Submit):
                self._submits[message.rid] = self._next
            self._next += 1
        if messages:
            self._hand_over()

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

    async def take(self, at_most_s: float, begin: Callable[[list[Message]], T]) -> T:
        """What `begin` makes of all messages in order, or of none after `at_most_s`.

        Whoever puts the first one calls it: a task that is woken for that runs behind all that is
        ready now, and in a burst of requests that is every one of them.
        """
        if self._messages:
            return begin(self._taken())
        self._begin = begin
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(at_most_s, self._hand_over)
        try:
            begun: T = await self._waiter
            return begun
        finally:
            timer.cancel()
            self._waiter = None

    def _hand_over(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        try:
            self._waiter.set_result(self._begin(self._taken()))
        except Exception as error:
            self._waiter.set_exception(error)

    def _taken(self) -> list[Message]:
        taken = list(self._messages.values())
        self.clear()
        return taken
