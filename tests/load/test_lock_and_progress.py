"""The lock between processes, and the bar on a console and in a log."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from engine_actor.load.lock import exclusive
from engine_actor.load.progress import ConsoleProgress

_HOLDER = """
import pathlib, sys
from engine_actor.load.lock import exclusive
with exclusive(pathlib.Path(sys.argv[1]), lambda: None):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("ends", ["well", "killed"])
def test_the_lock_goes_with_its_holder(tmp_path: Path, project_root: Path, ends: str) -> None:
    """The waiter is told once that it waits, and gets in when the other process is gone."""
    path = tmp_path / "lock"
    command = [sys.executable, "-c", _HOLDER, str(path)]
    with subprocess.Popen(
        command, cwd=project_root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        told: list[str] = []

        def waiting() -> None:
            told.append("waits")
            if ends == "killed":
                holder.kill()
            else:
                assert holder.stdin is not None
                holder.stdin.write("\n")
                holder.stdin.flush()

        with exclusive(path, waiting):
            assert told == ["waits"]
    with exclusive(path, lambda: pytest.fail("nobody holds it")):
        pass


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_one_redrawn_line_per_stage() -> None:
    terminal = _Terminal()
    bar = ConsoleProgress("demo", terminal)
    for done in (0, 1, 500, 1000):
        bar("check", done, 1000)
    bar("convert", 1, 1)
    lines = terminal.getvalue().split("\r")
    assert lines[1:] == [
        f"demo: check        [{'.' * 28}]   0 %",
        f"demo: check        [{'#' * 14}{'.' * 14}]  50 %",
        f"demo: check        [{'#' * 28}] 100 %\n",
        f"demo: convert      [{'#' * 28}] 100 %\n",
    ]


def test_a_log_sees_two_lines_per_stage() -> None:
    log = io.StringIO()
    bar = ConsoleProgress("demo", log)
    bar("download", 0, 0)
    for done in (0, 300, 1000):
        bar("download", done, 1000)
    assert log.getvalue() == "demo: download ...\ndemo: download done\n"
