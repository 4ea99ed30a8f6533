"""Where NVRTC and the CUDA headers are on this machine: wheels first, then CuPy, then a toolkit.

Knows file names and folders only; loads nothing. No environment variable is read here.
"""

from __future__ import annotations

import importlib.util
import site
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

INSTALL = (
    "install nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12 "
    "(or nvidia-cuda-nvrtc and nvidia-cuda-runtime for CUDA 13)"
)
HEADER = "cuda_fp16.h"
LIBRARY_PATTERNS = ("libnvrtc.so.*", "nvrtc64_*.dll")
BUILTINS_PATTERNS = ("libnvrtc-builtins.so.*", "nvrtc-builtins64_*.dll")
TOOLKITS = ("/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda")


class ToolkitMissing(RuntimeError):
    """NVRTC or the headers are not on this machine; the message says what to install."""


@cache
def nvrtc_libraries() -> tuple[Path, ...]:
    """Every NVRTC shared library found, the preferred first; empty where there is none."""
    return tuple(_found(LIBRARY_PATTERNS))


def builtins_beside(library: Path) -> tuple[Path, ...]:
    """The builtins libraries that lie in the folder of `library`: NVRTC of the CUDA 13 wheel does
    not find its own unless it is loaded already.
    """
    return tuple(sorted(path for p in BUILTINS_PATTERNS for path in library.parent.glob(p)))


@cache
def include_folders() -> tuple[Path, ...]:
    """Folders to give to the compiler, the one with cuda_fp16.h first.

    Raises ToolkitMissing where no such header is found.
    """
    for folder in _folders("include"):
        if (folder / HEADER).exists():
            # CUDA 13 keeps <nv/target> and <cuda/std/...> in a folder of their own.
            libcudacxx = folder / "cccl"
            return (folder, libcudacxx) if libcudacxx.is_dir() else (folder,)
    raise ToolkitMissing(f"the CUDA header {HEADER} was not found: {INSTALL}")


def _found(patterns: tuple[str, ...]) -> Iterator[Path]:
    seen = set()
    for folder in _folders("lib", "lib64", "bin"):
        for pattern in patterns:
            # The newest of one folder first; "alt" builds are for other C libraries.
            for path in sorted(folder.glob(pattern), reverse=True):
                if ".alt." not in path.name and path.resolve() not in seen:
                    seen.add(path.resolve())
                    yield path


def _folders(*names: str) -> Iterator[Path]:
    for root in _roots():
        for name in names:
            if (root / name).is_dir():
                yield root / name


def _roots() -> Iterator[Path]:
    """Folders that look like a toolkit's: they hold include, lib, lib64 or bin."""
    for base in dict.fromkeys((*site.getsitepackages(), site.getusersitepackages(), *sys.path)):
        nvidia = Path(base) / "nvidia"
        if nvidia.is_dir():
            # nvidia/cuda_nvrtc, nvidia/cuda_runtime (CUDA 12) or nvidia/cu13 (CUDA 13).
            yield from sorted(path for path in nvidia.iterdir() if path.is_dir())
    bundled = _bundled_with_cupy()
    if bundled is not None:
        yield bundled
    for toolkit in TOOLKITS:
        if Path(toolkit).is_dir():
            yield Path(toolkit)


def _bundled_with_cupy() -> Path | None:
    """CuPy's wheels carry the half-precision headers of each CUDA version they support."""
    spec = importlib.util.find_spec("cupy")
    if spec is None or spec.origin is None:
        return None
    carried = Path(spec.origin).parent / "_core" / "include" / "cupy" / "_cuda"
    versions = sorted(carried.glob("cuda-*")) if carried.is_dir() else []
    return versions[-1] if versions else None
