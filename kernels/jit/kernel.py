"""CudaSource and Kernel: what a backend writes down about its .cu file, and how it calls it.

Nothing is compiled, and neither CuPy nor a driver is touched, before the first launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kernels.jit.compile import Defines, compile_cubin
from kernels.jit.cubin_cache import Cubin, Resources
from kernels.jit.launch import Launcher
from kernels.jit.source import KERNELS_FOLDER


@dataclass(frozen=True, slots=True)
class CudaSource:
    """A CUDA file, named by its path below kernels/. `#include "x.cuh"` means kernels/include."""

    path: str

    def kernel(
        self,
        entry: str,
        defines: Mapping[str, int | float | str] | None = None,
        *,
        shared_bytes: int = 0,
    ) -> Kernel:
        """The extern "C" __global__ function `entry` under `defines`.

        shared_bytes: dynamic shared memory of a block where a launch does not say otherwise.
        """
        return Kernel(self, entry, dict(defines or {}), shared_bytes)

    def compiled(self, defines: Defines, sm: int) -> Cubin:
        """The whole file's cubin, compiled at most once in a process. Raises as compile_cubin."""
        return _compiled(self.path, tuple(sorted(defines.items())), sm)


@cache
def _compiled(path: str, defines: tuple[tuple[str, int | float | str], ...], sm: int) -> Cubin:
    return compile_cubin(KERNELS_FOLDER / path, dict(defines), sm)


class Kernel:
    """One entry of a source under fixed defines; hold on to it, the first launch compiles."""

    __slots__ = ("_launcher", "defines", "entry", "shared_bytes", "source")

    def __init__(self, source: CudaSource, entry: str, defines: Defines, shared_bytes: int) -> None:
        self.source = source
        self.entry = entry
        self.defines = defines
        self.shared_bytes = shared_bytes
        self._launcher = Launcher(entry, self._cubin)

    def _cubin(self, sm: int) -> Cubin:
        return self.source.compiled(self.defines, sm)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        *arguments: Any,
        shared_bytes: int | None = None,
        launch_dependents: bool = False,
        cluster: int = 1,
    ) -> None:
        """Queue the kernel on torch's current stream of the current device; returns at once.

        A torch tensor is passed as its pointer and None as a null pointer, int as int32, float as
        float32, and bytes, of one length for each kernel, as a structure by value. shared_bytes:
        dynamic shared memory of a block, more than 48 KiB allowed where the card allows it.
        launch_dependents: programmatic dependent launch, the kernel may start before the one ahead
        of it in the stream ends (it must wait by griddepcontrol); ignored below sm_90. cluster:
        with launch_dependents, blocks along y, of whose number it is a divisor, that run side by
        side and reach each other's shared memory. Raises LaunchError with the driver's reason.
        """
        shared = self.shared_bytes if shared_bytes is None else shared_bytes
        self._launcher.launch(grid, block, arguments, shared, launch_dependents, cluster)

    def load(self) -> None:
        """Compile and load for the current device now: nothing may be loaded during a capture."""
        self._launcher.load()

    def blocks_per_multiprocessor(self, threads: int, shared_bytes: int | None = None) -> int:
        """How many blocks of `threads` one multiprocessor of the current device holds at once."""
        shared = self.shared_bytes if shared_bytes is None else shared_bytes
        return self._launcher.blocks_per_multiprocessor(threads, shared)

    def clusters_at_once(self, threads: int, cluster: int) -> int:
        """How many clusters of `cluster` blocks of `threads` the current device holds at once; 0
        below sm_90."""
        return self._launcher.clusters_at_once(threads, self.shared_bytes, cluster)

    def resources(self, sm: int) -> Resources:
        """Registers, spills and static shared memory on sm_<sm>; needs NVRTC, no GPU.

        Raises LookupError where the source has no such entry.
        """
        return self._cubin(sm).of(self.entry)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in sorted(self.defines.items()))
        return f"{self.source.path}:{self.entry}({given})"


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel that is shipped, with its budget. Every source lists its own in `SHIPPED`.

    max_registers: a thread's, on sm_86. max_shared_bytes: a block's, static and dynamic together;
    `shared_bytes` is the dynamic part as launched. threads: of a block, for the occupancy table.
    spill_bytes: stores and loads allowed, 0 unless a comment says why. first_sm: the oldest
    architecture it is for.
    """

    source: CudaSource
    entry: str
    defines: Mapping[str, int | float | str] = field(default_factory=dict)
    max_registers: int = 255
    max_shared_bytes: int = 48 * 1024
    threads: int = 256
    shared_bytes: int = 0
    spill_bytes: int = 0
    first_sm: int = 80

    def kernel(self) -> Kernel:
        """The kernel to launch."""
        return self.source.kernel(self.entry, self.defines, shared_bytes=self.shared_bytes)
