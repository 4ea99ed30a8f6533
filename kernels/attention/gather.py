"""Keys and values of given slots out of a paged cache in half precision, in one launch: gather.cu.

torch's index_select checks against the cache's size, which a captured graph of it would keep.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant

SOURCE = CudaSource("attention/gather.cu")
ENTRY = "gather_slots"
THREADS = 256
VECTOR_BYTES = 16
VARIANT = Variant(SOURCE, ENTRY, max_registers=32, threads=THREADS)
SHIPPED = (VARIANT,)


@cache
def _kernel() -> Kernel:
    return VARIANT.kernel()


def gather_slots(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """kv [blocks, block_tokens, 2, kv_heads, head_dim], a slot of whole 16 bytes; slots i32[K],
    block * block_tokens + offset, below its size, which nobody checks: [K, 2, kv_heads, head_dim].
    """
    out = torch.empty(len(slots), *kv.shape[2:], dtype=kv.dtype, device=kv.device)
    vectors = kv[0, 0].numel() * kv.element_size() // VECTOR_BYTES
    grid = -(-len(slots) * vectors // THREADS)
    _kernel().launch((grid, 1, 1), (THREADS, 1, 1), kv, slots, out, len(slots), vectors)
    return out
