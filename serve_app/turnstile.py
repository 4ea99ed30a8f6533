"""Requests that come at once are looked at a few in a turn of the event loop, in order.

Reading a request takes some 0.3 ms of the loop. Sixty-four that are ready in the same turn would
keep it from all else for twenty: from what the first of them is told, from every stream.
"""

from __future__ import annotations

import asyncio
from collections import deque

A_TURN = 5
"""A step that takes the first alone, and the four that make a step behind it."""


class Turnstile:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = A_TURN

    async def enter(self) -> None:
        """At once for the first A_TURN of a turn, else when all who came before have."""
        loop = asyncio.get_running_loop()
        if self._left == A_TURN:
            loop.call_soon(self._turn, loop)
        if self._left:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = A_TURN
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled: its client has left
                turn.set_result(None)
                self._left -= 1
        if self._left < A_TURN:
            loop.call_soon(self._turn, loop)
