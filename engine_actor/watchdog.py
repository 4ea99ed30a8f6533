"""Ends the engine's process when its scheduler thread is stuck, dead, or its device is lost.

Serve's health check of a deployment actor only asks whether the process answers, and that stays
true while a scheduler hangs. Crash-only on purpose: Serve then starts a fresh engine. Knows
neither Ray nor the engine; it is given a heartbeat to read.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

log = logging.getLogger(__name__)

EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h; it stands in Ray's death message."""


def leave_process(reason: str) -> NoReturn:
    """Write why and every thread's stack to stderr, then end at once: no destructor, no atexit,
    which might wait for the very thread that hangs.
    """
    sys.stderr.write(f"engine watchdog: {reason}; stacks of all threads follow\n")
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(EXIT_CODE)


class Pulse(Protocol):
    """`engine_actor.loop.Heartbeat`, as far as the watchdog needs it."""

    @property
    def alive(self) -> bool: ...

    @property
    def busy_seconds(self) -> float: ...

    @property
    def fatal(self) -> str | None: ...


class Watchdog:
    """A thread that asks every `period_s` seconds whether the engine is well.

    The first bad answer calls `leave` once and ends the thread.
    """

    def __init__(
        self,
        heartbeat: Callable[[], Pulse],
        limit_s: float,
        period_s: float = 0.5,
        leave: Callable[[str], object] = leave_process,
    ) -> None:
        self._heartbeat = heartbeat
        self._limit_s = limit_s
        self._period_s = period_s
        self._leave = leave
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; a scheduler thread may end in peace afterwards."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def trouble(self) -> str | None:
        """What is wrong now, in one line, or None."""
        pulse = self._heartbeat()
        if pulse.fatal is not None:
            return f"fatal error: {pulse.fatal}"
        if not pulse.alive:
            return "the scheduler thread is dead"
        if pulse.busy_seconds > self._limit_s:
            ran, limit = pulse.busy_seconds, self._limit_s
            return f"a step has run for {ran:.1f} s, the limit is {limit:g} s"
        return None

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                reason = self.trouble()
            except Exception as error:
                log.exception("the watchdog cannot ask")
                reason = f"the watchdog cannot ask: {error!r}"
            if reason is not None and not self._stopped.is_set():
                self._leave(reason)
                return
