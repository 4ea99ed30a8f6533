"""The driver's calls behind virtual_memory.py: addresses, memory, and the mapping between them.

Through ctypes; nothing is called before a pool is made. Knows one device and no pool.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kernels.jit import driver
from kernels.jit.driver import LaunchError, check

_OUT_OF_MEMORY = 2
_SUPPORTED = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Bytes:
    """Tells torch where a foreign array lies; holds the pool for as long as a tensor does."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaMemory:
    """The real calls. Raises LaunchError where the driver cannot do it."""

    def __init__(self, device: int) -> None:
        driver.enter_context(device)
        self._library = _declared(driver.driver())
        self._device = device
        location = _Location(_ON_DEVICE, device)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        found = ctypes.c_size_t()
        status = self._library.cuMemGetAllocationGranularity(
            ctypes.byref(found), ctypes.byref(self._properties), 0
        )
        check(status, "asking for the granularity of memory")
        self.granularity = found.value

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        status = self._library.cuMemAddressReserve(ctypes.byref(address), size, 0, 0, 0)
        check(status, f"reserving {size} bytes of addresses")
        return address.value

    def free(self, address: int, size: int) -> None:
        check(self._library.cuMemAddressFree(address, size), "freeing addresses")

    def map(self, address: int, size: int) -> None:
        handle = ctypes.c_uint64()
        status = self._library.cuMemCreate(
            ctypes.byref(handle), size, ctypes.byref(self._properties), 0
        )
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"CUDA out of memory: no {size} bytes for the KV pool")
        check(status, f"taking {size} bytes of memory")
        mapped = self._library.cuMemMap(address, size, 0, handle, 0)
        # The mapping holds the memory from here on; without one it goes back at once.
        check(self._library.cuMemRelease(handle), "letting go of a handle")
        check(mapped, f"mapping {size} bytes")

    def allow(self, address: int, size: int) -> None:
        status = self._library.cuMemSetAccess(address, size, ctypes.byref(self._access), 1)
        check(status, f"opening {size} bytes to the device")

    def unmap(self, address: int, size: int) -> None:
        check(self._library.cuMemUnmap(address, size), f"unmapping {size} bytes")

    def synchronize(self) -> None:
        driver.enter_context(self._device)
        check(self._library.cuCtxSynchronize(), "waiting for the device")

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        device = torch.device("cuda", self._device)
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=device)
        return torch.as_tensor(_Bytes(address, size, owner), device=device)


def why_no_virtual_memory(device: int) -> str | None:
    """None where memory can be mapped under reserved addresses, else a line that says why not."""
    try:
        driver.enter_context(device)
        found = ctypes.c_int()
        status = driver.driver().cuDeviceGetAttribute(ctypes.byref(found), _SUPPORTED, device)
        check(status, "asking for virtual memory management")
        if not found.value:
            return "the driver does not manage virtual memory on this card"
        CudaMemory(device)
    except LaunchError as error:
        return str(error)
    return None


def _declared(library: Any) -> Any:
    """The argument types: sizes, addresses and handles are 64 bits wide."""
    wide, pointer = ctypes.c_uint64, ctypes.c_void_p
    size = ctypes.c_size_t
    try:
        library.cuMemGetAllocationGranularity.argtypes = [pointer, pointer, ctypes.c_int]
        library.cuMemAddressReserve.argtypes = [pointer, size, size, wide, wide]
        library.cuMemAddressFree.argtypes = [wide, size]
        library.cuMemCreate.argtypes = [pointer, size, pointer, wide]
        library.cuMemMap.argtypes = [wide, size, size, wide, wide]
        library.cuMemRelease.argtypes = [wide]
        library.cuMemSetAccess.argtypes = [wide, size, pointer, size]
        library.cuMemUnmap.argtypes = [wide, size]
    except AttributeError as error:
        raise LaunchError(f"the driver has no virtual memory management: {error}") from None
    return library
