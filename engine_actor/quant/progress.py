"""A progress bar with the time left, for steps that take minutes to hours. Knows no step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from engine_actor.load.progress import WIDTH


class TimedProgress:
    """Redraws its line on a terminal; elsewhere a line per tenth. The time left comes from the rate
    since the stage was first seen, so work that an earlier run did is not counted.
    """

    def __init__(
        self,
        title: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._stage = ""
        self._first = 0
        self._began = 0.0
        self._shown = -1

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage, self._first, self._began, self._shown = stage, done, self._clock(), -1
        percent = 100 * done // total if total else 0
        is_terminal = self._stream.isatty()
        mark = percent if is_terminal else percent // 10
        if mark == self._shown:
            return
        self._shown = mark
        text = (
            f"{self._title}: {stage:<12} [{_bar(percent)}] {percent:3d} %{self._left(done, total)}"
        )
        end = "\n" if done >= total > 0 or not is_terminal else ""
        self._stream.write(f"\r{text:<99}{end}" if is_terminal else f"{text}{end}")
        self._stream.flush()

    def _left(self, done: int, total: int) -> str:
        steps = done - self._first
        if steps <= 0 or done >= total:
            return ""
        return f", {spell((self._clock() - self._began) / steps * (total - done))} left"


def _bar(percent: int) -> str:
    filled = WIDTH * percent // 100
    return "#" * filled + "." * (WIDTH - filled)


def spell(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
