"""Small inputs out of the host's page-locked memory: fetch.cu. Knows bytes, not what they mean."""

from __future__ import annotations

import struct
from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant

SOURCE = CudaSource("kv/fetch.cu")
ENTRY = "fetch_words"
THREADS = 128
WORD = 16
"""Bytes of one load; the host's memory is readable up to a multiple of it."""
MOST_FETCHED = 1 << 16
"""Bytes up to which a kernel is the faster way."""
VARIANT = Variant(SOURCE, ENTRY, max_registers=32, threads=THREADS)
SHIPPED = (VARIANT,)


@cache
def _kernel() -> Kernel:
    return VARIANT.kernel()


class Fetch:
    """To one device, torch's current one, for which the kernel is compiled and loaded here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        _kernel().load()

    def __call__(self, host: torch.Tensor) -> torch.Tensor:
        """A new tensor with the bytes of host u8[n], which is page-locked, begins at a multiple of
        16, and stays as it is until torch's current stream has come here.
        """
        if len(host) > MOST_FETCHED:
            return host.to(self._device, non_blocking=True, copy=True)
        words = -(-len(host) // WORD)
        out = torch.empty(words * WORD, dtype=torch.uint8, device=self._device)
        # By address: a launch takes no tensor that torch calls the CPU's.
        address = struct.pack("P", host.data_ptr())
        _kernel().launch((-(-words // THREADS), 1, 1), (THREADS, 1, 1), address, out, words)
        return out[: len(host)]
