"""A CUDA source with everything it includes, found by reading `#include` lines.

The text of all of them is part of a cubin's key: a changed header makes a new cubin.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

KERNELS_FOLDER = Path(__file__).resolve().parent.parent
INCLUDE_FOLDER = KERNELS_FOLDER / "include"
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


def included_files(source: Path, folders: Iterable[Path]) -> tuple[Path, ...]:
    """`source` and every file it reaches through `#include`, sorted; conditions are not read.

    A name that is found neither beside the including file nor in `folders` is left out: it is a
    header that the compiler carries itself, or one that only another compiler would ask for.
    """
    return _closure(source.resolve(), tuple(folders))


def digest(files: Iterable[Path]) -> str:
    """SHA-256 over names and contents."""
    total = hashlib.sha256()
    for path in files:
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


@cache
def _closure(source: Path, folders: tuple[Path, ...]) -> tuple[Path, ...]:
    found = {source}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        for name in _names(path):
            target = _resolve(name, path, folders)
            if target is not None and target not in found:
                found.add(target)
                waiting.append(target)
    return tuple(sorted(found))


@cache
def _names(path: Path) -> tuple[str, ...]:
    return tuple(name.decode() for name in _INCLUDE.findall(path.read_bytes()))


def _resolve(name: str, asking: Path, folders: tuple[Path, ...]) -> Path | None:
    for folder in (asking.parent, *folders):
        target = folder / name
        if target.is_file():
            return target.resolve()
    return None
