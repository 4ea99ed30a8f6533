"""The one thread that touches the engine: inbox, step, outbox; sleeps while there is nothing to do.

Knows the engine's verbs and no client. Other threads hand in calls and get futures back; what the
clients hear goes out through `publish`, on this thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from engine_actor.engine import Engine
from engine_actor.errors import EngineRestarted
from engine_actor.events import StepEvents

LOGGER = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """For the watchdog. `busy_seconds`: how long the thread has been at the same step or call, 0
    while it sleeps. `fatal`: why it ended, where it did not end by stop()."""

    alive: bool
    busy_seconds: float
    steps: int
    fatal: str | None


class EngineLoop:
    """start() it once; call() it from any thread; stop() it once."""

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[StepEvents], None],
        tick: Callable[[], None] = lambda: None,
        tick_s: float = 1.0,
        on_fatal: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._engine = engine
        self._publish = publish
        self._tick = tick
        self._tick_s = tick_s
        self.on_fatal = on_fatal
        self._inbox: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._idle: list[Future[None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._busy_since: float | None = None
        self._steps = 0
        self.fatal: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step it is in; calls that it has not taken are refused."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._refuse_rest()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function(engine)` between two steps, in order of arrival. The future raises what the
        function raised, or EngineRestarted where the thread has ended."""
        future: Future[T] = Future()
        with self._wake:
            if self._stopping or self.fatal is not None:
                future.set_exception(EngineRestarted("the engine has stopped"))
                return future
            self._inbox.append((function, future))
            self._wake.notify()
        return future

    def when_idle(self) -> Future[None]:
        """A future that is done once the engine has nothing left to do."""
        future: Future[None] = Future()
        self.call(lambda engine: self._idle.append(future)).add_done_callback(
            lambda call: None if call.exception() is None else future.set_result(None)
        )
        return future

    def heartbeat(self) -> Heartbeat:
        """May be called from any thread."""
        since = self._busy_since
        busy = 0.0 if since is None else time.monotonic() - since
        fatal = None if self.fatal is None else f"{type(self.fatal).__name__}: {self.fatal}"
        return Heartbeat(self._thread.is_alive(), busy, self._steps, fatal)

    def _run(self) -> None:
        try:
            due = time.monotonic() + self._tick_s
            while self._wait(due):
                now = self._busy_since = time.monotonic()
                if now >= due or self._inbox:
                    self._tick()
                    due = now + self._tick_s
                self._take_calls()
                if self._engine.has_work:
                    self._publish(self._engine.step())
                    self._steps += 1
                self._answer_idle()
        except BaseException as error:
            self._die(error)
        finally:
            self._busy_since = None

    def _wait(self, due: float) -> bool:
        """Sleep until there is a call, a step or a tick to do. False once stopping."""
        with self._wake:
            while not (self._stopping or self._inbox or self._engine.has_work):
                self._busy_since = None
                left = due - time.monotonic()
                if left <= 0:
                    break
                self._wake.wait(left)
            return not self._stopping

    def _take_calls(self) -> None:
        """Run everything that came in. What a call raises is its caller's, not ours."""
        for _ in range(len(self._inbox)):
            function, future = self._inbox.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

    def _answer_idle(self) -> None:
        if self._idle and not self._engine.has_work:
            waiting, self._idle = self._idle, []
            for future in waiting:
                future.set_result(None)

    def _die(self, error: BaseException) -> None:
        """Answer everybody, then tell whoever ends the process."""
        LOGGER.critical("the engine is lost", exc_info=error)
        with self._wake:
            self.fatal = error
        try:
            self._publish(self._engine.abort_all(EngineRestarted.code))
        except Exception:
            LOGGER.exception("could not end all requests")
        self._refuse_rest()
        self.on_fatal(error)

    def _refuse_rest(self) -> None:
        while self._inbox:
            _, future = self._inbox.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineRestarted("the engine has stopped"))
        waiting, self._idle = self._idle, []
        for idle in waiting:
            idle.set_result(None)
