"""Two streams on disjoint sets of multiprocessors: green contexts, through the CUDA driver.

Needs a driver of CUDA 12.4 or later and a card that can be split; `split_card` says so in one line
where that is missing. Kernels loaded in the primary context run on such streams as they are. A
launch with more blocks than its partition holds is not cut, it queues: whoever launches persistent
blocks must know the partition's size. Knows no model and no torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

from kernels.jit import driver
from kernels.jit.driver import LaunchError

SM_RESOURCE = 1
"""CU_DEV_RESOURCE_TYPE_SM."""
DEFAULT_STREAM = 1
"""CU_GREEN_CTX_DEFAULT_STREAM, required of every green context."""
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING, required of every stream of one."""
_RESOURCE_BYTES = 512
"""CUdevResource takes 144; later drivers may write more."""
_COUNT_OFFSET = 96
"""Of CUdevResource: the type and its padding, then CUdevSmResource.smCount."""
_CALLS = (
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxStreamCreate",
)


class GreenContextRefused(RuntimeError):
    """Driver or card cannot split; the message is the reason, for status()."""


@dataclass(frozen=True, slots=True)
class Partition:
    """stream: the driver's handle, for torch.cuda.ExternalStream. multiprocessors: its own."""

    stream: int
    multiprocessors: int


@cache
def split_card(
    device: int, first: int, priorities: tuple[int, int] = (0, 0)
) -> tuple[Partition, Partition]:
    """A partition of at least `first` multiprocessors, and one of all the others.

    The driver rounds up to what the card can split, eight on Hopper. priorities: of the two
    streams. Contexts and streams live as long as the process, as torch holds memory by stream; so
    the same split is made once. Raises GreenContextRefused.
    """
    library = _library()
    try:
        driver.enter_context(device)
        whole = _whole(library, device)
        count = _count(whole)
        if not 0 < first < count:
            raise GreenContextRefused(f"{first} of {count} multiprocessors leave nothing to split")
        part, rest = _split(library, whole, first)
        return (
            _partition(library, device, part, priorities[0]),
            _partition(library, device, rest, priorities[1]),
        )
    except LaunchError as error:
        raise GreenContextRefused(str(error)) from None


def _library() -> ctypes.CDLL:
    try:
        library = driver.driver()
    except LaunchError as error:
        raise GreenContextRefused(str(error)) from None
    missing = [name for name in _CALLS if not hasattr(library, name)]
    if missing:
        raise GreenContextRefused(f"the driver is older than CUDA 12.4: no {missing[0]}")
    return library


def _whole(library: ctypes.CDLL, device: int) -> ctypes.Array[ctypes.c_char]:
    resource = ctypes.create_string_buffer(_RESOURCE_BYTES)
    found = library.cuDeviceGetDevResource(_handle(library, device), resource, SM_RESOURCE)
    driver.check(found, "asking for the card's multiprocessors")
    return resource


def _split(
    library: ctypes.CDLL, whole: ctypes.Array[ctypes.c_char], first: int
) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]:
    part = ctypes.create_string_buffer(_RESOURCE_BYTES)
    rest = ctypes.create_string_buffer(_RESOURCE_BYTES)
    groups = ctypes.c_uint(1)
    made = library.cuDevSmResourceSplitByCount(
        part, ctypes.byref(groups), whole, rest, ctypes.c_uint(0), ctypes.c_uint(first)
    )
    driver.check(made, f"splitting off {first} of {_count(whole)} multiprocessors")
    if groups.value != 1 or not _count(part) or not _count(rest):
        raise GreenContextRefused(
            f"the card cannot split off {first} of {_count(whole)} multiprocessors"
        )
    return part, rest


def _partition(
    library: ctypes.CDLL, device: int, resource: ctypes.Array[ctypes.c_char], priority: int
) -> Partition:
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    status = library.cuDevResourceGenerateDesc(
        ctypes.byref(description), resource, ctypes.c_uint(1)
    )
    driver.check(status, "describing a part of the card")
    status = library.cuGreenCtxCreate(
        ctypes.byref(context), description, _handle(library, device), ctypes.c_uint(DEFAULT_STREAM)
    )
    driver.check(status, "making a green context")
    status = library.cuGreenCtxStreamCreate(
        ctypes.byref(stream), context, ctypes.c_uint(NON_BLOCKING), ctypes.c_int(priority)
    )
    driver.check(status, "making a stream of a green context")
    assert stream.value is not None
    return Partition(stream.value, _count(resource))


def _handle(library: ctypes.CDLL, device: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    driver.check(library.cuDeviceGet(ctypes.byref(handle), device), f"opening device {device}")
    return handle


def _count(resource: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.c_uint.from_buffer(resource, _COUNT_OFFSET).value
