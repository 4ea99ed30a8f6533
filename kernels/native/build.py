"""From the C++ sources beside this file to a shared library for this very CPU, kept on disk.

A library is named by everything that it depends on (sources, flags, compiler, CPU), so an update
builds a new one and never loads an old one. Knows compilers; knows no kernel and no tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-w",
)
TUNED_FLAGS = (
    ("-march=native", "-fopenmp-simd"),
    ("-mcpu=native", "-fopenmp-simd"),
    ("-fopenmp-simd",),
    (),
)
"""Tried in this order: not every compiler knows every flag."""
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300.0
"""Seven seconds on an idle core; several processes on a busy machine took more than a minute."""
WORK = "building-"
LITTER_S = 3600.0
"""Work folders older than this belong to processes that were killed."""


class BuildError(RuntimeError):
    """No library; the message is one line and says why."""


def find_compiler(wanted: str | None = None) -> tuple[str, ...]:
    """The command of a C++ compiler: `wanted` (as in $CXX), else one on the path, else the one of
    the `ziglang` wheel. Raises BuildError where there is none.
    """
    if wanted:
        try:
            command = tuple(shlex.split(wanted))
        except ValueError as error:
            raise BuildError(f"$CXX cannot be read: {str(error).lower()}") from None
        if not command:
            return find_compiler()
        if shutil.which(command[0]) is None:
            raise BuildError(f"the C++ compiler {command[0]} is not there")
        return command
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return (found,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    raise BuildError("no C++ compiler (c++, g++, clang++), and the ziglang wheel is not installed")


def build_library(folder: Path, compiler: Sequence[str], capability: str) -> Path:
    """The library for this machine in `folder`, built if it is not there yet.

    capability: what names the CPU's vector units, part of the library's name beside the model of
    the CPU. Several processes may build at once: the last one to finish replaces equal content.
    Raises BuildError.
    """
    sources = sorted((*SOURCE_FOLDER.glob("*.cpp"), *SOURCE_FOLDER.glob("*.h")))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    for part in (_version(compiler), capability, cpu_model(), repr((COMMON_FLAGS, TUNED_FLAGS))):
        digest.update(part.encode() + b"\0")
    target = folder / f"native-{digest.hexdigest()[:24]}.so"
    # An empty one is what a power cut may leave of a file that was just renamed.
    if target.is_file() and target.stat().st_size:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=WORK) as work:
            made = Path(work) / target.name
            _compile(compiler, [str(s) for s in sources if s.suffix == ".cpp"], made)
            os.replace(made, target)
    except OSError as error:
        raise BuildError(f"cannot keep a library in {folder}: {error.strerror}") from None
    return target


def _sweep(folder: Path) -> None:
    for litter in folder.glob(f"{WORK}*"):
        with contextlib.suppress(OSError):  # its owner, or another sweeper, was faster
            if time.time() - litter.stat().st_mtime > LITTER_S:
                shutil.rmtree(litter, ignore_errors=True)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Architecture, and the CPU's model and flags where Linux tells them: a cache folder may be
    shared by unlike machines."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "flags", "Features", "CPU part")
    told = [line for line in lines.splitlines() if line.startswith(kept)]
    return "\n".join((platform.machine(), *told))


def _version(compiler: Sequence[str]) -> str:
    done = _run([*compiler, "--version"])
    if done.returncode != 0:
        raise BuildError(f"the C++ compiler {compiler[0]} does not run")
    return done.stdout


def _compile(compiler: Sequence[str], sources: Sequence[str], target: Path) -> None:
    """Raises BuildError with the compiler's own first error."""
    complaint = ""
    for tuned in TUNED_FLAGS:
        done = _run([*compiler, *COMMON_FLAGS, *tuned, "-o", str(target), *sources])
        if done.returncode == 0:
            return
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        complaint = complaint or (errors or done.stderr.splitlines() or ["no message"])[0]
    raise BuildError(f"{compiler[0]} cannot build the native kernels: {complaint.strip()}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Raises BuildError where it cannot be run or hangs."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",  # compilers quote sources and paths in any encoding
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {command[0]} does not run: {error}") from None
