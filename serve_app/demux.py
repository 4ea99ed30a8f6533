"""One stream of StepBatches -> one bounded receiver per HTTP request.

A receiver merges what its reader has not fetched yet, so a slow reader costs one bigger chunk and
never a queue of small ones. Knows nothing of text or HTTP. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_actor.core.plan import TokenLogprobs
from engine_actor.messages import Extra, Flag, StepBatch, Usage
from serve_app.protocol.errors import ApiError

_OPEN = (Flag.RUNNING, Flag.REQUEUED)


@dataclass(slots=True)
class Part:
    """What one sequence has made since its reader last looked; several batches may be merged.

    `prompt_logprobs` holds (first prompt position, entries) pieces. `flag` is the latest.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, tuple[TokenLogprobs, ...]]] = field(default_factory=list)
    flag: Flag = Flag.RUNNING
    usage: Usage | None = None
    stop_token: int | None = None
    error_code: str | None = None

    @property
    def finished(self) -> bool:
        """True once the engine will say no more of this sequence."""
        return self.flag not in _OPEN

    def merge(self, tokens: tuple[int, ...], flag: Flag, extra: Extra | None) -> None:
        """Add one batch's share."""
        self.tokens.extend(tokens)
        self.flag = flag
        if extra is None:
            return
        self.logprobs.extend(extra.logprobs)
        if extra.prompt_logprobs:
            self.prompt_logprobs.append((extra.prompt_start, extra.prompt_logprobs))
        self.usage = extra.usage or self.usage
        if extra.stop_token is not None:
            self.stop_token = extra.stop_token
        self.error_code = extra.error_code or self.error_code


class Receiver:
    """The reader's end of one HTTP request, all its sequences together."""

    def __init__(self, rids: range, capacity: int) -> None:
        self.rids = rids
        self._capacity = capacity
        self._pending: dict[int, Part] = {}
        self._n_pending = 0
        self._unheard = set(rids)
        """Sequences of which there is no sign yet that the engine took them; empty = accepted."""
        self._failure: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._give_up_at = 0.0

    async def next(self, at_most_s: float | None = None) -> dict[int, Part]:
        """Everything new by rid, at least one part; an empty dict after `at_most_s` seconds.

        Nothing comes before the engine has accepted all sequences, so a refusal of one of them is
        never late. Raises ApiError once the request has failed and all that came before is read.
        """
        if not self._readable() and at_most_s != 0:
            await self._wait(at_most_s)
        if self._pending and self._readable():
            taken, self._pending, self._n_pending = self._pending, {}, 0
            return taken
        if self._failure is not None:
            raise self._failure
        return {}

    def close(self) -> None:
        """The reader is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def accept(self) -> None:
        """The engine has all sequences."""
        self._unheard.clear()
        self._wake()

    def fail(self, code: str) -> None:
        """End the request with an error; the first one stands."""
        if self._failure is None:
            self._failure = ApiError(code)
            if self._unheard:
                self._pending.clear()
            self._wake()

    def push(self, rid: int, tokens: tuple[int, ...], flag: Flag, extra: Extra | None) -> bool:
        """Add one batch's share of one sequence. False where the reader is too far behind.

        A batch may overtake the answer to the post, and a short sequence may end before it: what
        makes tokens was accepted.
        """
        if self._unheard:
            self._unheard.discard(rid)
        part = self._pending.get(rid)
        if part is None:
            part = self._pending[rid] = Part()
        part.merge(tokens, flag, extra)
        self._n_pending += len(tokens)
        self._wake()
        return self._n_pending <= self._capacity

    def _readable(self) -> bool:
        return self._failure is not None or (not self._unheard and bool(self._pending))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._readable():
            self._waiter.set_result(None)

    async def _wait(self, at_most_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        if at_most_s is not None:
            self._give_up_at = loop.time() + at_most_s
            if self._timer is None or self._timer.when() > self._give_up_at:
                self.close()
                self._timer = loop.call_at(self._give_up_at, self._time_is_up)
        try:
            await waiter
        finally:
            self._waiter = None

    def _time_is_up(self) -> None:
        """One timer serves many waits: made anew for each token it would cost more than the token.
        It fires at the time of the wait it was made for and moves on to the present one.
        """
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        loop = self._waiter.get_loop()
        if loop.time() >= self._give_up_at:
            self._waiter.set_result(None)
        else:
            self._timer = loop.call_at(self._give_up_at, self._time_is_up)


class Demux:
    """rid -> receiver. `on_overflow` is told of a receiver whose reader is too far behind."""

    def __init__(self, on_overflow: Callable[[Receiver], None]) -> None:
        self._receivers: dict[int, Receiver] = {}
        self._on_overflow = on_overflow

    @property
    def live(self) -> int:
        """Sequences the engine still owes an end."""
        return len(self._receivers)

    def open(self, receiver: Receiver) -> None:
        """Route the receiver's rids to it."""
        for rid in receiver.rids:
            self._receivers[rid] = receiver

    def live_rids(self, receiver: Receiver) -> list[int]:
        """Those of its sequences that have not ended."""
        return [rid for rid in receiver.rids if self._receivers.get(rid) is receiver]

    def is_live(self, rid: int) -> bool:
        """True while the engine owes this sequence an end."""
        return rid in self._receivers

    def close(self, rid: int) -> None:
        """Hear no more of one sequence."""
        self._receivers.pop(rid, None)

    def accept(self, rids: list[int]) -> None:
        """A post with these submits was answered; all but the rejected ones are the engine's."""
        for receiver in {id(r): r for rid in rids if (r := self._receivers.get(rid))}.values():
            receiver.accept()

    def reject(self, rid: int, code: str) -> None:
        """The engine refused one sequence, so its whole request fails."""
        receiver = self._receivers.pop(rid, None)
        if receiver is not None:
            receiver.fail(code)

    def deliver(self, batch: StepBatch) -> None:
        """Hand one batch out. Unknown rids are of requests that were closed: dropped."""
        extras = dict(batch.extra) if batch.extra else {}
        start = 0
        for rid, count, flag in zip(batch.rids, batch.counts, batch.flags, strict=True):
            end = start + count
            receiver = self._receivers.get(rid)
            if receiver is not None:
                if flag not in _OPEN:
                    del self._receivers[rid]
                if not receiver.push(rid, batch.tokens[start:end], flag, extras.get(rid)):
                    self._on_overflow(receiver)
            start = end

    def fail_all(self, code: str) -> None:
        """The engine is gone: every waiter hears it now."""
        receivers = {id(receiver): receiver for receiver in self._receivers.values()}
        self._receivers.clear()
        for receiver in receivers.values():
            receiver.fail(code)
