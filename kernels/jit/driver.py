"""The few calls of the CUDA driver that a launch needs, through ctypes. Loaded on first use.

Memory is never taken here: torch's allocator owns the card.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from functools import cache
from typing import Any

STATIC_SHARED = 1
"""CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES."""
MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""
LAUNCH_CONFIG = "7I P P I"
"""CUlaunchConfig: grid, block, dynamic shared memory; stream; attributes and their number."""
_INVALID_CONTEXT = 201
_OUT_OF_MEMORY = 2
_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class LaunchError(RuntimeError):
    """The driver refused; the message holds its reason and what was being done. status: the
    driver's number, 0 where it was never asked.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_out_of_memory(self) -> bool:
        """The device had no memory for it; it is as well as before."""
        return self.status == _OUT_OF_MEMORY


@cache
def driver() -> ctypes.CDLL:
    """libcuda. Raises LaunchError where there is no driver."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        library.cuInit(0)
        # Handles are 64 bits wide: without these, ctypes would cut them to an int.
        library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    except (OSError, AttributeError) as error:
        raise LaunchError(f"no usable CUDA driver: {error}") from None
    return library


def check(status: int, doing: str) -> None:
    """Raises LaunchError unless `status` is success."""
    if status:
        raise LaunchError(f"{doing}: {reason(status)}", status)


def reason(status: int) -> str:
    """The driver's name and text of an error."""
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver().cuGetErrorName(status, ctypes.byref(name))
    driver().cuGetErrorString(status, ctypes.byref(text))
    if not name.value or not text.value:
        return f"CUDA error {status}"
    return f"{name.value.decode()} ({text.value.decode()})"


def enter_context(device: int) -> None:
    """Make `device`'s primary context, the one torch uses, current in this thread if none is."""
    current = ctypes.c_void_p()
    check(driver().cuCtxGetCurrent(ctypes.byref(current)), "asking for the current context")
    if current.value:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    check(driver().cuDeviceGet(ctypes.byref(handle), device), f"opening device {device}")
    retained = driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    check(retained, f"opening the context of device {device}")
    check(driver().cuCtxSetCurrent(context), f"entering the context of device {device}")


def is_missing_context(status: int) -> bool:
    """True where the calling thread has no context yet."""
    return status == _INVALID_CONTEXT


def load_function(code: bytes, entry: str) -> int:
    """The handle of `entry` in the cubin `code`, loaded into the current context for good."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuModuleLoadData(ctypes.byref(module), code), f"loading the cubin of {entry}")
    found = driver().cuModuleGetFunction(ctypes.byref(function), module, entry.encode())
    check(found, f"looking up {entry} in its cubin")
    assert function.value is not None
    return function.value


def static_shared(function: int) -> int:
    """Bytes of static shared memory of a block."""
    found = ctypes.c_int()
    status = driver().cuFuncGetAttribute(
        ctypes.byref(found), STATIC_SHARED, ctypes.c_void_p(function)
    )
    check(status, "asking for static shared memory")
    return found.value


def allow_shared(function: int, bytes_wanted: int, entry: str) -> None:
    """Let `function` use up to `bytes_wanted` of dynamic shared memory."""
    status = driver().cuFuncSetAttribute(
        ctypes.c_void_p(function), MAX_DYNAMIC_SHARED, bytes_wanted
    )
    check(status, f"{entry} asks for {bytes_wanted} bytes of dynamic shared memory")


def blocks_per_multiprocessor(function: int, threads: int, shared_bytes: int) -> int:
    """The driver's occupancy answer."""
    blocks = ctypes.c_int()
    status = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks), ctypes.c_void_p(function), threads, ctypes.c_size_t(shared_bytes)
    )
    check(status, "asking for occupancy")
    return blocks.value


def capture_of(stream: int) -> int:
    """The number of the capture that is recording `stream`: never given twice, 0 for none."""
    state, capture = ctypes.c_int(), ctypes.c_uint64()
    status = driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(state), ctypes.byref(capture), None, None, None
    )
    check(status, "asking what a stream is captured for")
    return capture.value if state.value else 0


def launch_attributes(cluster: int) -> Any:
    """CUlaunchAttributes that allow programmatic dependent launch and make clusters of so many
    blocks along y, where that is more than 1; keep them alive.
    """
    words = 18  # id, padding, a value of 64 bytes
    attributes = (ctypes.c_int * (words * (2 if cluster > 1 else 1)))()
    attributes[0] = PROGRAMMATIC_STREAM_SERIALIZATION
    attributes[2] = 1
    if cluster > 1:
        attributes[words] = CLUSTER_DIMENSION
        attributes[words + 2 : words + 5] = [1, cluster, 1]
    return attributes


def clusters_at_once(function: int, threads: int, shared_bytes: int, cluster: int) -> int:
    """How many clusters of so many blocks the current device holds at once."""
    attributes, found = launch_attributes(cluster), ctypes.c_int()
    config = ctypes.create_string_buffer(struct.calcsize("@" + LAUNCH_CONFIG + "0P"))
    sizes = (1, cluster, 1, threads, 1, 1, shared_bytes)
    struct.pack_into("@" + LAUNCH_CONFIG, config, 0, *sizes, 0, ctypes.addressof(attributes), 2)
    status = driver().cuOccupancyMaxActiveClusters(
        ctypes.byref(found), ctypes.c_void_p(function), config
    )
    check(status, f"asking for room for clusters of {cluster} blocks")
    return found.value
