"""Cubins on disk, shared by every process of a user.

One file per key, written beside and renamed, so that a reader sees a whole file or none; two
processes that compile the same thing at once both write the same bytes. Knows no compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from configs.load import cache_dir

_MAGIC = b"deepinfer-cubin-1"
_FOLDER_NAME = "cubins"
_folder: Path | None = None


def set_cubin_folder(folder: Path | None) -> None:
    """Where cubins are kept from now on, made when the first is written; None: as configured."""
    global _folder
    _folder = folder


def cubin_folder() -> Path:
    """Where cubins are kept: the folder set, else one in the configured cache."""
    return cache_dir() / _FOLDER_NAME if _folder is None else _folder


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes. registers: a thread's. spill_bytes: stores and loads to local memory,
    a thread's. shared_bytes: static, a block's.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one program. resources: by the entry's name."""

    code: bytes
    resources: Mapping[str, Resources]

    def of(self, entry: str) -> Resources:
        """What `entry` takes. Raises LookupError that names the entries there are."""
        if entry not in self.resources:
            raise LookupError(f"no kernel is named {entry!r}; there are {sorted(self.resources)}")
        return self.resources[entry]


def load_cubin(key: str) -> Cubin | None:
    """The cubin kept under `key`; None where there is none or the file is damaged."""
    try:
        stored = _path(key).read_bytes()
    except OSError:
        return None
    magic, _, rest = stored.partition(b"\n")
    header, _, code = rest.partition(b"\n")
    if magic != _MAGIC:
        return None
    try:
        facts = json.loads(header)
        resources = {name: Resources(**values) for name, values in facts["resources"].items()}
    except (ValueError, KeyError, TypeError):
        return None
    if hashlib.sha256(code).hexdigest() != facts["sha256"]:
        return None
    return Cubin(code, resources)


def store_cubin(key: str, cubin: Cubin) -> None:
    """Keep `cubin` under `key`. A folder that cannot be written costs a warning, not the kernel."""
    facts = {
        "resources": {name: asdict(found) for name, found in cubin.resources.items()},
        "sha256": hashlib.sha256(cubin.code).hexdigest(),
    }
    content = b"\n".join((_MAGIC, json.dumps(facts).encode(), cubin.code))
    try:
        folder = cubin_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
            file.write(content)
        _rename(Path(file.name), _path(key))
    except OSError as error:
        warnings.warn(f"compiled kernels are not kept: {error}", RuntimeWarning, stacklevel=2)


def _rename(part: Path, final: Path) -> None:
    try:
        part.replace(final)
    except OSError:
        # Windows refuses while another process reads the same key: then it is there already.
        with contextlib.suppress(OSError):
            part.unlink()
        if not final.exists():
            raise


def _path(key: str) -> Path:
    return cubin_folder() / f"{key}.cubin"
