"""The native library loaded once a process, on torch's own threads; or the reason why not.

Functions are called through ctypes, which releases the GIL. Knows the C signatures; knows no layer.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from configs.load import cache_dir, wanted_compiler
from kernels.native.build import BuildError, build_library, find_compiler

VERSION = 1
"""As native_version() in linear.cpp."""
FOLDER = "native"
POOLS = re.compile(r"/(lib[gio]+mp[^/]*\.so[^/]*)$")
"""OpenMP runtimes that have GOMP_parallel: GCC's, Intel's, LLVM's."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The functions. shares_pool: False where torch's threads were not found and calls run on one.

    linear(layer, x, y, rows, threads), layers(shape, layers, count, kv, step, threads): addresses
    and counts, 0 where all is well; see linear.cpp and layers.cpp.
    """

    path: Path
    shares_pool: bool
    linear: Callable[..., int]
    layers: Callable[..., int]

    def threads(self) -> int:
        """How many a call may use: torch's own number, as it is now."""
        return torch.get_num_threads() if self.shares_pool else 1


@cache
def native_library() -> NativeLibrary | str:
    """The library for this machine, built at the first call of the first process that asks; or one
    line that says why there is none.
    """
    if platform.system() not in ("Linux", "Darwin"):
        return f"not built on {platform.system()}"
    try:
        compiler = find_compiler(wanted_compiler())
        capability = torch.backends.cpu.get_cpu_capability()
        path = build_library(cache_dir() / FOLDER, compiler, capability)
        return _load(path)
    except BuildError as error:
        return str(error)


def why_not_native() -> str | None:
    """None where there is a library."""
    found = native_library()
    return found if isinstance(found, str) else None


def _load(path: Path) -> NativeLibrary:
    """Raises BuildError where the file is no library of this version."""
    try:
        library = ctypes.CDLL(str(path))
        version = library.native_version()
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None
    if version != VERSION:
        raise BuildError(f"{path} has version {version}, not {VERSION}")
    library.native_set_pool.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    pool = _torch_pool()
    if pool is not None:
        library.native_set_pool(*pool)
    address, count = ctypes.c_void_p, ctypes.c_int64
    library.native_linear.argtypes = [address, address, address, count, ctypes.c_int]
    library.native_layers.argtypes = [address, address, count, address, address, ctypes.c_int]
    return NativeLibrary(path, pool is not None, library.native_linear, library.native_layers)


def _torch_pool() -> tuple[int | None, int | None] | None:
    """Addresses of GOMP_parallel and omp_get_num_threads in the OpenMP runtime that torch has
    loaded. A second runtime would have threads of its own, which spin for the same cores.
    """
    for path in _loaded_pools():
        runtime = ctypes.CDLL(path)
        try:
            functions = (runtime.GOMP_parallel, runtime.omp_get_num_threads)
        except AttributeError:
            continue
        parallel, size = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
        return parallel, size
    return None


def _loaded_pools(maps: Path = Path("/proc/self/maps")) -> list[str]:
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/") and POOLS.search(line)}
    # torch's own copy first: another package may have brought one that torch does not use.
    return sorted(paths, key=lambda path: ("/torch/" not in path, path))
