"""The watchdog: what it takes for trouble, and that it really ends a process that hangs."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest

from engine_actor.watchdog import EXIT_CODE, Watchdog


@dataclass
class Pulse:
    """A heartbeat in the hand of the test."""

    alive: bool = True
    busy_seconds: float = 0.0
    fatal: str | None = None


@pytest.mark.parametrize(
    ("pulse", "reason"),
    [
        (Pulse(), None),
        (Pulse(busy_seconds=2.0), None),
        (Pulse(busy_seconds=2.1), "a step has run for 2.1 s, the limit is 2 s"),
        (Pulse(alive=False), "the scheduler thread is dead"),
        (Pulse(fatal="CUDA error: misaligned address"), "fatal error: CUDA error: misaligned"),
        (Pulse(alive=False, fatal="lost"), "fatal error: lost"),
    ],
)
def test_what_is_trouble(pulse, reason):
    said = Watchdog(lambda: pulse, limit_s=2.0).trouble()
    assert said is None if reason is None else said.startswith(reason)


def test_the_first_trouble_is_told_once_and_ends_the_watch():
    pulse, told, heard = Pulse(), [], threading.Event()

    def leave(reason: str) -> None:
        told.append(reason)
        heard.set()

    watchdog = Watchdog(lambda: pulse, limit_s=1.0, period_s=0.001, leave=leave)
    watchdog.start()
    pulse.busy_seconds = 5.0
    assert heard.wait(10)
    watchdog.stop()
    assert told == ["a step has run for 5.0 s, the limit is 1 s"]


def test_a_heartbeat_that_cannot_be_read_is_trouble():
    told, heard = [], threading.Event()

    def heartbeat() -> Pulse:
        raise RuntimeError("no pulse")

    def leave(reason: str) -> None:
        told.append(reason)
        heard.set()

    watchdog = Watchdog(heartbeat, limit_s=1.0, period_s=0.001, leave=leave)
    watchdog.start()
    assert heard.wait(10)
    watchdog.stop()
    assert told == ["the watchdog cannot ask: RuntimeError('no pulse')"]


def test_nothing_is_told_after_stop():
    pulse, told = Pulse(), []
    watchdog = Watchdog(lambda: pulse, limit_s=1.0, period_s=0.001, leave=told.append)
    watchdog.start()
    watchdog.stop()
    pulse.alive = False
    assert told == []


_HANGING = """
import threading
from engine_actor.watchdog import Watchdog

class Pulse:
    alive, busy_seconds, fatal = True, 99.0, None

def a_step_that_never_ends():
    threading.Event().wait()

threading.Thread(target=a_step_that_never_ends).start()
Watchdog(Pulse, limit_s=1.0, period_s=0.001).start()
"""


def test_a_hanging_process_ends_with_stacks_of_all_threads(project_root):
    """The thread is no daemon, so a normal exit would wait for it for ever."""
    done = subprocess.run(
        [sys.executable, "-c", _HANGING],
        cwd=project_root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == EXIT_CODE
    assert "a step has run for 99.0 s" in done.stderr
    assert "a_step_that_never_ends" in done.stderr
