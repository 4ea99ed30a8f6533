"""Progress of slow steps, and the bar that shows it on a console. Knows no step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[str, int, int], None]
"""(stage, done, total): total 0 means unknown, done == total ends the stage."""

WIDTH = 28


def silent(stage: str, done: int, total: int) -> None:
    """Show nothing."""


class ConsoleProgress:
    """A bar that redraws its line on a terminal; elsewhere a line when a stage begins and ends."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream if stream is not None else sys.stderr
        self._stage = ""
        self._drawn = -1

    def __call__(self, stage: str, done: int, total: int) -> None:
        percent = 100 * done // total if total else 0
        is_new, is_over = stage != self._stage, total > 0 and done >= total
        if not is_new and percent == self._drawn:
            return
        self._stage, self._drawn = stage, percent
        if self._stream.isatty():
            filled = WIDTH * percent // 100
            bar = "#" * filled + "." * (WIDTH - filled)
            end = "\n" if is_over else ""
            self._stream.write(f"\r{self._title}: {stage:<12} [{bar}] {percent:3d} %{end}")
        elif is_new or is_over:
            self._stream.write(f"{self._title}: {stage}{' done' if is_over else ' ...'}\n")
        self._stream.flush()
