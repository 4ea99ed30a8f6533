"""NVRTC by two doors: CuPy's low-level binding where CuPy is installed, else ctypes.

Both give the same thing, one program compiled to a cubin and its log. Neither needs a driver.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from kernels.jit.cupy_memory import route_to_torch
from kernels.jit.toolkit import INSTALL, ToolkitMissing, builtins_beside, nvrtc_libraries


class NvrtcError(RuntimeError):
    """The program did not compile. `log` is the compiler's own text."""

    def __init__(self, status: str, log: str) -> None:
        super().__init__(f"{status}\n{log}")
        self.status = status
        self.log = log


class Nvrtc(Protocol):
    """A loaded NVRTC. version: (major, minor). architectures: compute capabilities it knows."""

    version: tuple[int, int]
    architectures: tuple[int, ...]

    def compile(self, text: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
        """(cubin, log). Raises NvrtcError with the log where the program has errors."""
        ...


@cache
def nvrtc() -> Nvrtc:
    """The NVRTC of this machine, loaded once. Raises ToolkitMissing where there is none."""
    tried = []
    try:
        return _CupyNvrtc()
    except (ImportError, RuntimeError, OSError) as error:
        tried.append(f"CuPy: {_first_line(error)}")
    for library in nvrtc_libraries():
        try:
            return _CtypesNvrtc(library)
        except OSError as error:
            tried.append(f"{library}: {_first_line(error)}")
    raise ToolkitMissing(f"NVRTC was not found: {INSTALL}. Tried: " + "; ".join(tried))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


class _CupyNvrtc:
    """CuPy's binding: the library that CuPy itself would use."""

    def __init__(self) -> None:
        for library in nvrtc_libraries():
            _preload_builtins(library)
        route_to_torch(importlib.import_module("cupy"))
        self._binding: Any = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        major, minor = self._binding.getVersion()
        self.version = (int(major), int(minor))
        self.architectures = tuple(int(sm) for sm in self._binding.getSupportedArchs())

    def compile(self, text: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
        binding = self._binding
        program = binding.createProgram(text, name, (), ())
        try:
            binding.compileProgram(program, tuple(options))
            return bytes(binding.getCUBIN(program)), str(binding.getProgramLog(program))
        except binding.NVRTCError as error:
            raise NvrtcError(str(error), str(binding.getProgramLog(program))) from None
        finally:
            binding.destroyProgram(program)


class _CtypesNvrtc:
    """The same calls through ctypes, for machines without CuPy."""

    def __init__(self, library: Path) -> None:
        _preload_builtins(library)
        self._lib = ctypes.CDLL(str(library))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)
        count = ctypes.c_int()
        self._check(self._lib.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        known = (ctypes.c_int * count.value)()
        self._check(self._lib.nvrtcGetSupportedArchs(known))
        self.architectures = tuple(known)

    def compile(self, text: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
        program = ctypes.c_void_p()
        made = self._lib.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), os.fsencode(name), 0, None, None
        )
        self._check(made)
        try:
            flags = (ctypes.c_char_p * len(options))(*map(os.fsencode, options))
            status = self._lib.nvrtcCompileProgram(program, len(options), flags)
            log = self._read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise NvrtcError(self._text(status), log)
            return self._read(program, "nvrtcGetCUBIN"), log
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"{name}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, name)(program, buffer))
        return buffer.raw

    def _text(self, status: int) -> str:
        return str(self._lib.nvrtcGetErrorString(status).decode())

    def _check(self, status: int) -> None:
        if status:
            raise OSError(f"NVRTC: {self._text(status)}")


def _preload_builtins(library: Path) -> None:
    for builtins in builtins_beside(library):
        mode = getattr(ctypes, "RTLD_GLOBAL", 0)
        ctypes.CDLL(str(builtins), mode=mode)
