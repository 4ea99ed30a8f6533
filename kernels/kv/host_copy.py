"""Blocks of a KV cache between their device and slots in the host's memory.

On CUDA one kernel over page-locked memory (host_copy.cu); torch's copies elsewhere, which is also
what the kernel is tested against. Knows addresses and bytes; knows no stream and not why.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant

SOURCE = CudaSource("kv/host_copy.cu")
ENTRY = "copy_blocks"
THREADS = 256
VARIANT = Variant(SOURCE, ENTRY, {"THREADS": THREADS}, max_registers=64, threads=THREADS)
SHIPPED = (VARIANT,)
THREAD_BLOCKS = 16
WORD = 16
"""Bytes of one load; what an array has of a block is a multiple of it, or torch copies it."""

Moves = Sequence[tuple[int, int]]
"""(block of the cache, slot of the host), each at most once."""


@cache
def _kernel() -> Kernel:
    return VARIANT.kernel()


def refuse_copy_kernel(block_bytes: Sequence[int]) -> str | None:
    """None where the kernel can copy such blocks, else why not. block_bytes: of each array."""
    odd = [each for each in block_bytes if each % WORD]
    return f"{odd[0]} bytes of a block are no multiple of {WORD}" if odd else None


def load_copy_kernel() -> None:
    """Compile and load it for torch's current device."""
    _kernel().load()


def copy_blocks(
    moves: torch.Tensor,
    arrays: torch.Tensor,
    offsets: torch.Tensor,
    host: torch.Tensor,
    to_host: bool,
    thread_blocks: int = THREAD_BLOCKS,
) -> None:
    """Queue the copies on torch's current stream. moves i32[n, 2]: block, slot; arrays i64[A]:
    addresses of the cache's arrays; offsets i64[A + 1]: where each array's part begins in a slot,
    then the bytes of a slot; host u8[slots * bytes]. All four are page-locked or on the device, and
    stay as they are until the copies are done.
    """
    count, n_arrays = moves.shape[0], arrays.shape[0]
    grid = (min(thread_blocks, count * n_arrays), 1, 1)
    # By address: a launch takes no tensor that torch calls the CPU's.
    lists = [struct.pack("P", tensor.data_ptr()) for tensor in (moves, arrays, offsets, host)]
    _kernel().launch(grid, (THREADS, 1, 1), *lists, count, n_arrays, int(to_host))


def copy_blocks_plainly(
    moves: Moves, arrays: Sequence[torch.Tensor], host: torch.Tensor, to_host: bool
) -> None:
    """The same without a kernel. arrays: [n_blocks, ...] each; host u8[slots, bytes]."""
    for block, slot in moves:
        begin = 0
        for array in arrays:
            part = array[block].view(-1).view(torch.uint8)
            kept = host[slot, begin : begin + len(part)]
            if to_host:
                kept.copy_(part, non_blocking=True)
            else:
                part.copy_(kept, non_blocking=True)
            begin += len(part)
