"""Launching: torch tensors to pointers, torch's current stream, one driver call.

The hot path packs the arguments into a buffer made once for their types and costs a few
microseconds. Buffers are taken from a stack while in use, so threads never share one. Works in
torch.cuda.graph captures because the driver copies the arguments at the call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch

from kernels.jit import driver
from kernels.jit.cubin_cache import Cubin
from kernels.jit.driver import LAUNCH_CONFIG, LaunchError

SHARED_WITHOUT_PERMISSION = 48 * 1024
"""A block's static and dynamic shared memory together, in bytes."""
PROGRAMMATIC_SM = 90
_POINTER, _INT, _FLOAT = "P", "i", "f"
Extent = tuple[int, int, int]


class Launcher:
    """One entry point on every device it was launched on. cubin: sm -> its compiled source."""

    __slots__ = ("_cubin", "_entry", "_loaded")

    def __init__(self, entry: str, cubin: Callable[[int], Cubin]) -> None:
        self._entry = entry
        self._cubin = cubin
        self._loaded: dict[int, _Loaded] = {}

    def launch(
        self,
        grid: Extent,
        block: Extent,
        arguments: tuple[Any, ...],
        shared: int,
        dependents: bool,
        cluster: int = 1,
    ) -> None:
        """Queue it on torch's current stream of torch's current device."""
        device = torch._C._cuda_getDevice()
        loaded = self._loaded.get(device) or self._load(device)
        types = tuple(map(type, arguments))
        layout = loaded.layouts.get(types)
        if layout is None:
            layout = loaded.layouts[types] = Layout(self._entry, arguments, device)
        if shared > loaded.shared_allowed:
            driver.allow_shared(loaded.function, shared, self._entry)
            loaded.shared_allowed = shared
        buffer = layout.free.pop() if layout.free else _Buffer(layout)
        values = list(arguments)
        for place in layout.tensors:
            values[place] = values[place].data_ptr()
        for place in layout.nulls:
            values[place] = 0
        layout.pack(buffer.arguments, 0, *values)
        stream = torch._C._cuda_getCurrentRawStream(device)
        if dependents and loaded.programmatic:
            attributes = loaded.attributes_of(cluster)
            count = 1 if cluster == 1 else 2
            _pack_config(buffer.config_bytes, 0, *grid, *block, shared, stream, attributes, count)
        else:
            _pack_config(buffer.config_bytes, 0, *grid, *block, shared, stream, 0, 0)
        status = loaded.launch(buffer.config, loaded.function, buffer.parameters, None)
        if status:
            status = self._once_more(loaded, buffer, device, status)
        layout.free.append(buffer)
        if status:
            raise LaunchError(
                f"{self._entry} with grid {grid}, block {block}, {shared} bytes of dynamic shared "
                f"memory: {driver.reason(status)}",
                status,
            )

    def load(self) -> None:
        """Compile and load for torch's current device."""
        device = torch.cuda.current_device()
        if device not in self._loaded:
            self._load(device)

    def blocks_per_multiprocessor(self, threads: int, shared: int) -> int:
        """On torch's current device."""
        device = torch.cuda.current_device()
        loaded = self._loaded.get(device) or self._load(device)
        if shared > loaded.shared_allowed:
            driver.allow_shared(loaded.function, shared, self._entry)
            loaded.shared_allowed = shared
        return driver.blocks_per_multiprocessor(loaded.function, threads, shared)

    def clusters_at_once(self, threads: int, shared: int, cluster: int) -> int:
        """On torch's current device; 0 where there are no clusters."""
        device = torch.cuda.current_device()
        loaded = self._loaded.get(device) or self._load(device)
        if not loaded.programmatic:
            return 0
        key = (threads, shared, cluster)
        if key not in loaded.clusters:
            self.blocks_per_multiprocessor(threads, shared)  # allows the shared memory
            found = driver.clusters_at_once(loaded.function, threads, shared, cluster)
            loaded.clusters[key] = found
        return loaded.clusters[key]

    def _load(self, device: int) -> _Loaded:
        major, minor = torch.cuda.get_device_capability(device)
        driver.enter_context(device)
        sm = major * 10 + minor
        function = driver.load_function(self._cubin(sm).code, self._entry)
        static_shared = driver.static_shared(function)
        loaded = self._loaded[device] = _Loaded(function, static_shared, sm >= PROGRAMMATIC_SM)
        return loaded

    def _once_more(self, loaded: _Loaded, buffer: _Buffer, device: int, status: int) -> int:
        """A thread that has called nothing of CUDA yet has no context; torch makes it lazily."""
        if not driver.is_missing_context(status):
            return status
        driver.enter_context(device)
        return int(loaded.launch(buffer.config, loaded.function, buffer.parameters, None))


class _Loaded:
    """A function in one device's context."""

    __slots__ = (
        "_attributes",
        "clusters",
        "function",
        "launch",
        "layouts",
        "programmatic",
        "shared_allowed",
    )

    def __init__(self, function: int, static_shared: int, programmatic: bool) -> None:
        self.function = function
        self.launch = driver.driver().cuLaunchKernelEx
        self.layouts: dict[tuple[type, ...], Layout] = {}
        self.shared_allowed = SHARED_WITHOUT_PERMISSION - static_shared
        self.programmatic = programmatic
        self.clusters: dict[tuple[int, int, int], int] = {}
        self._attributes: dict[int, Any] = {}

    def attributes_of(self, cluster: int) -> int:
        """The address of a launch's attributes, which live as long as this does."""
        attributes = self._attributes.get(cluster)
        if attributes is None:
            attributes = self._attributes[cluster] = driver.launch_attributes(cluster)
        return ctypes.addressof(attributes)


class Layout:
    """Where arguments of given types lie in a buffer, by C's own rules of alignment."""

    __slots__ = ("free", "nulls", "offsets", "pack", "size", "tensors")

    def __init__(self, entry: str, arguments: tuple[Any, ...], device: int) -> None:
        letters = [_letter(entry, place, value, device) for place, value in enumerate(arguments)]
        packing = struct.Struct("@" + "".join(letters))
        self.offsets = [
            struct.calcsize("@" + "".join(letters[: place + 1])) - struct.calcsize(letters[place])
            for place in range(len(letters))
        ]
        self.size = packing.size
        self.pack = packing.pack_into
        pointers = [place for place, letter in enumerate(letters) if letter == _POINTER]
        self.tensors = [place for place in pointers if arguments[place] is not None]
        self.nulls = [place for place in pointers if arguments[place] is None]
        self.free: list[_Buffer] = []


def _letter(entry: str, place: int, value: Any, device: int) -> str:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cuda" or value.device.index != device:
            raise LaunchError(
                f"{entry}: argument {place} is on {value.device}, the current device is "
                f"cuda:{device}"
            )
        return _POINTER
    if value is None:
        return _POINTER
    if isinstance(value, int):
        return _INT
    if isinstance(value, float):
        return _FLOAT
    if isinstance(value, bytes):
        return f"{len(value)}s"
    raise TypeError(
        f"{entry}: argument {place} is a {type(value).__name__}; pass tensors, None, int, float or "
        "bytes"
    )


_pack_config = struct.Struct("@" + LAUNCH_CONFIG).pack_into
_CONFIG_SIZE = struct.calcsize("@" + LAUNCH_CONFIG + "0P")


class _Buffer:
    """Room for one launch: its arguments, the pointers to them, and the launch configuration."""

    __slots__ = ("_pointers", "arguments", "config", "config_bytes", "parameters")

    def __init__(self, layout: Layout) -> None:
        self.arguments = ctypes.create_string_buffer(max(layout.size, 1))
        base = ctypes.addressof(self.arguments)
        self._pointers = (ctypes.c_void_p * max(len(layout.offsets), 1))(
            *(base + offset for offset in layout.offsets)
        )
        self.parameters = ctypes.addressof(self._pointers)
        self.config_bytes = ctypes.create_string_buffer(_CONFIG_SIZE)
        self.config = ctypes.addressof(self.config_bytes)
