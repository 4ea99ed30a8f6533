"""A limit on how long one write to a client may take, at next to no cost for each write.

One timer per response looks now and then whether the present write is overdue; a timer for every
write would cost more than the write. So a client is cut between one and one and a quarter limits.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Message, Send


class SlowClient(Exception):
    """A write was not taken in time; there is nobody to tell."""


class BoundedSend:
    """`send` of one response, used by one task inside `with`. Raises SlowClient."""

    def __init__(self, send: Send, limit_s: float) -> None:
        self._send = send
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._since: float | None = None
        self._overdue = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> BoundedSend:
        self._check_later()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        self._since = self._loop.time()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._overdue and self._task is not None and self._task.uncancel() == 0:
                raise SlowClient from None
            raise
        finally:
            self._since = None

    def _check_later(self) -> None:
        self._timer = self._loop.call_later(self._limit_s / 4, self._check)

    def _check(self) -> None:
        since = self._since
        if since is None or self._loop.time() - since < self._limit_s:
            self._check_later()
        elif self._task is not None:
            self._overdue = True
            self._task.cancel()
