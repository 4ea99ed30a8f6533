"""Keys and values of given slots out of a paged cache in half precision, in one launch: gather.cu.

torch's index_select checks against the cache's size, which a captured graph of it would keep.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.pack.int8_kv import Int8KV, stored

SOURCE = CudaSource("attention/gather.cu")
ENTRY = "gather_slots"
THREADS = 256
VECTOR_BYTES = 16
DTYPES = {torch.float16: 0, torch.bfloat16: 1}


def variant(kv_bits: int, bf16: int) -> Variant:
    """The compiled kernel for one kind of cache, with its budget. bf16: of what codes become."""
    defines = {"KV_BITS": kv_bits, "BF16": bf16}
    return Variant(SOURCE, ENTRY, defines, max_registers=40, threads=THREADS)


SHIPPED = (variant(16, 0), variant(8, 0), variant(8, 1))


@cache
def _kernel(kv_bits: int, bf16: int) -> Kernel:
    return variant(kv_bits, bf16).kernel()


def load_gather(kv_bits: int, dtype: torch.dtype) -> None:
    """Compile and load the kernel of such a cache for the current device."""
    _kernel(kv_bits, DTYPES[dtype] if kv_bits == 8 else 0).load()


def gather_slots(
    kv: torch.Tensor | Int8KV, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The values [K, 2, kv_heads, head_dim] in `dtype` of the slots i32[K], block * block_tokens +
    offset each, below the cache's size, which nobody checks. A head is whole 16 bytes of the cache,
    which holds codes, or `dtype`, fp16 or bf16.
    """
    codes, scales, bits = stored(kv)
    _, _, both, kv_heads, head_dim = codes.shape
    out = torch.empty(len(slots), both, kv_heads, head_dim, dtype=dtype, device=codes.device)
    head_vectors = head_dim * codes.element_size() // VECTOR_BYTES
    grid = -(-len(slots) * both * kv_heads * head_vectors // THREADS)
    _kernel(bits, DTYPES[dtype] if bits == 8 else 0).launch(
        (grid, 1, 1), (THREADS, 1, 1), codes, scales, slots, out, len(slots), kv_heads, head_vectors
    )
    return out
