"""One CUDA source, one set of defines, one architecture: to a cubin, kept on disk.

Errors name file, line and the line's text. Knows no device and launches nothing.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path

from kernels.jit.cubin_cache import Cubin, Resources, load_cubin, store_cubin
from kernels.jit.nvrtc import NvrtcError, nvrtc
from kernels.jit.source import INCLUDE_FOLDER, digest, included_files
from kernels.jit.toolkit import include_folders

LOGGER = logging.getLogger(__name__)
FLAGS = ("-std=c++17", "--ptxas-options=-v")
NO_CACHE = "--no-cache"
NO_CACHE_SINCE = (12, 9)
"""NVRTC keeps a cache of its own since then, and a program that comes from it has no log: then
nobody could say what the kernel takes.
"""
ARCHITECTURE_SPECIFIC = {90: "sm_90a"}
"""wgmma and setmaxnreg exist in the `a` target only; a cubin is for one architecture anyway."""
Defines = Mapping[str, int | float | str]
COMPILED: list[float] = []
"""Seconds that each compile of this process took; what came from the disk is not among them."""
_ERROR = re.compile(
    r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?P<text>(?:catastrophic )?error.*)$"
)
_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<target>[^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class CompileError(RuntimeError):
    """A CUDA source has errors. The message holds each with file, line and the line's text."""


def architecture(sm: int) -> str:
    """86 -> "sm_86", as NVRTC wants it."""
    return ARCHITECTURE_SPECIFIC.get(sm, f"sm_{sm}")


def compile_cubin(source: Path, defines: Defines, sm: int) -> Cubin:
    """The cubin of `source` for compute capability sm / 10, from the cache where it is there.

    Raises CompileError for errors in the source, ToolkitMissing where NVRTC or headers are absent.
    """
    folders = (INCLUDE_FOLDER, *include_folders())
    compiler = nvrtc()
    options = [f"--gpu-architecture={architecture(sm)}", *FLAGS, *define_options(defines)]
    files = included_files(source, folders)
    version = ".".join(map(str, compiler.version))
    key = _key(source, (version, digest(files), *options), sm)
    kept = load_cubin(key)
    if kept is not None:
        return kept
    if sm not in compiler.architectures:
        known = ", ".join(map(str, compiler.architectures))
        raise CompileError(f"NVRTC {version} does not know sm_{sm}; it knows {known}")
    LOGGER.info("compiling %s for sm_%d (once on this machine)", source.name, sm)
    begun = time.perf_counter()
    options += [f"-I{folder}" for folder in folders]
    if compiler.version >= NO_CACHE_SINCE:
        options.append(NO_CACHE)
    try:
        code, log = compiler.compile(source.read_text(encoding="utf-8"), str(source), options)
    except NvrtcError as error:
        raise CompileError(readable(error, source, defines, sm)) from None
    cubin = Cubin(code, resources_of(log))
    store_cubin(key, cubin)
    COMPILED.append(time.perf_counter() - begun)
    return cubin


def define_options(defines: Defines) -> list[str]:
    """{"BATCH": 8} -> ["-DBATCH=8"], sorted so that equal defines have equal keys."""
    return [f"-D{name}={value}" for name, value in sorted(defines.items())]


def _key(source: Path, parts: tuple[str, ...], sm: int) -> str:
    total = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return f"{source.stem}-sm{sm}-{total}"


def resources_of(log: str) -> dict[str, Resources]:
    """What each entry takes, read from the log that --ptxas-options=-v makes."""
    found: dict[str, Resources] = {}
    pieces = _ENTRY.split(log)
    # split() gives: text before, then name, target and text for each entry.
    for name, text in zip(pieces[1::3], pieces[3::3], strict=True):
        spills = _SPILLS.search(text)
        registers, shared = _REGISTERS.search(text), _SHARED.search(text)
        found[name] = Resources(
            registers=int(registers[1]) if registers else 0,
            spill_bytes=int(spills[1]) + int(spills[2]) if spills else 0,
            shared_bytes=int(shared[1]) if shared else 0,
        )
    return found


def readable(error: NvrtcError, source: Path, defines: Defines, sm: int) -> str:
    """Each error of the log with the line it points at."""
    given = " ".join(f"{name}={value}" for name, value in sorted(defines.items()))
    head = f"{source.name} does not compile for sm_{sm}" + (f" with {given}" if given else "")
    found = [_with_line(match) for match in map(_ERROR.match, error.log.splitlines()) if match]
    return "\n".join((head, *(found or (error.status, error.log.strip()))))


def _with_line(match: re.Match[str]) -> str:
    path, number = Path(match["file"]), int(match["line"])
    where = f"  {path.name}:{number}: {match['text']}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return where
    if not 0 < number <= len(lines):
        return where
    return f"{where}\n      {lines[number - 1].strip()}"
