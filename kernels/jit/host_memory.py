"""Page-locked memory of the host that the device reads and writes in place: one allocation of just
the bytes asked for.

torch's pinned allocator rounds up to a power of two, which of 9 GiB makes 16. Knows bytes, not what
they mean.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.jit import driver
from kernels.jit.driver import LaunchError, check

_PORTABLE, _ON_DEVICE = 1, 2
"""CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP."""


class PinnedBytes:
    """`tensor` u8[size] on the CPU, at one address for host and device. Nobody may read it after
    close(), which waits for the device.
    """

    def __init__(self, size: int, device: int) -> None:
        """Raises LaunchError where the driver does not lock so much."""
        driver.enter_context(device)
        library = driver.driver()
        library.cuMemHostAlloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        library.cuMemFreeHost.argtypes = [ctypes.c_void_p]
        address = ctypes.c_void_p()
        status = library.cuMemHostAlloc(ctypes.byref(address), size, _PORTABLE | _ON_DEVICE)
        check(status, f"locking {size} bytes of the host's memory")
        assert address.value is not None
        self._address: int | None = address.value
        self._device = device
        view = (ctypes.c_ubyte * size).from_address(address.value)
        self.tensor = torch.frombuffer(view, dtype=torch.uint8)

    def close(self) -> None:
        """Give it back, on any thread. Raises LaunchError where the driver does not take it."""
        if self._address is not None:
            address, self._address = self._address, None
            # A thread that has done nothing on a device has no context, and would free nothing.
            driver.enter_context(self._device)
            # A device that is lost has nothing under way.
            driver.driver().cuCtxSynchronize()
            check(driver.driver().cuMemFreeHost(address), "unlocking the host's memory")

    def __del__(self) -> None:
        try:
            self.close()
        except (AttributeError, LaunchError, TypeError):
            # Half made, or the process is ending and the driver has gone first.
            return
