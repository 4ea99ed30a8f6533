"""The parts of a long sweep, each in a process of its own that tells what it has as it goes.

A part writes its findings anew after each step; whoever started it reads them while it runs and
keeps them where it dies. Knows files and processes; knows nothing of what is measured.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LOOK_S = 2.0
"""From one look at a running part to the next."""
Found = dict[str, Any]
"""Plain values. `wrong` is a list of lines, whatever else a part tells is its own."""


def tell(found: Mapping[str, Any], path: Path) -> None:
    """Write a part's findings; a reader sees the old ones or these, whole."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found), encoding="utf-8")
    new.replace(path)


def run_part(
    words: Sequence[str],
    name: str,
    heard: Callable[[Found], object] = lambda found: None,
    look_s: float = LOOK_S,
) -> Found:
    """Run a command that tells its findings to the path given as `--output`; `heard` is given them
    as often as they are found changed. The last of them; with a line in `wrong` where it died."""
    found: Found = {"wrong": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "part.json")
        with subprocess.Popen([*words, "--output", str(path)]) as process:
            try:
                code = _wait(process, look_s)
                while code is None:
                    found = _newer(path, found, heard)
                    code = _wait(process, look_s)
            except BaseException:
                process.kill()
                raise
        found = _newer(path, found, heard)
    if code:
        found = found | {"wrong": [*found["wrong"], f"{name}: died with code {code}"]}
    return found


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _newer(path: Path, old: Found, heard: Callable[[Found], object]) -> Found:
    if not path.is_file():
        return old
    found: Found = json.loads(path.read_text(encoding="utf-8"))
    if found != old:
        heard(found)
    return found
