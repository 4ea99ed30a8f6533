"""From projected heads to queries and a written cache on CUDA, in one launch: write.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.kv.op import HeadNorms, StoreFn
from kernels.pack.int8_kv import Int8KV, stored
from kernels.spec.op import OpKey
from kernels.spec.registry import refuse_all_but_half

SOURCE = CudaSource("kv/write.cu")
ENTRY = "rotate_and_write"
HEADS_AT_ONCE = 8
LANES = 8
HEAD_DIMS = (64, 96, 128)
DTYPES = {torch.float16: 0, torch.bfloat16: 1}


def variant(head_dim: int, kv_bits: int, bf16: int, head_norm: int) -> Variant:
    """The compiled kernel for one kind of heads and cache, with its budget."""
    defines = {"HEAD_DIM": head_dim, "KV_BITS": kv_bits, "BF16": bf16, "HEAD_NORM": head_norm}
    return Variant(SOURCE, ENTRY, defines, max_registers=64, threads=HEADS_AT_ONCE * LANES)


SHIPPED = tuple(
    variant(head_dim, kv_bits, bf16, head_norm)
    for head_dim in HEAD_DIMS
    for kv_bits in (16, 8)
    for bf16 in (0, 1)
    for head_norm in (0, 1)
)


@cache
def _kernel(head_dim: int, kv_bits: int, bf16: int, head_norm: int) -> Kernel:
    return variant(head_dim, kv_bits, bf16, head_norm).kernel()


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """A row of heads: `queries`, then `kv` keys, then `kv` values; query_scale goes on the
    queries.
    """

    queries: int
    kv: int
    query_scale: float


class CudaStore:
    """The fused kernel for one kind of heads."""

    name = "cuda.store"

    def refuse(self, key: OpKey) -> str | None:
        """None where it can; else why not. See op.STORE for the axes."""
        if reason := refuse_all_but_half(key, "rounds to half precision", "holds"):
            return reason
        if key.k not in HEAD_DIMS:
            return f"heads of {key.k} are not among {HEAD_DIMS}"
        return None

    def prepare(
        self, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, counts: HeadCounts
    ) -> StoreFn:
        """For the positions of one forward. cos, sin f32[T, 1, head_dim], sin with the sign of its
        first half; slots i64[T], negative for a padding row, which writes nothing.
        """

        def run(
            heads: torch.Tensor, kv: torch.Tensor | Int8KV, norms: HeadNorms | None
        ) -> torch.Tensor:
            return self._run(heads, kv, norms, cos, sin, slots, counts)

        return run

    def _run(
        self,
        heads: torch.Tensor,
        kv: torch.Tensor | Int8KV,
        norms: HeadNorms | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        counts: HeadCounts,
    ) -> torch.Tensor:
        rows, count, head_dim = heads.shape
        codes, scales, bits = stored(kv)
        q = torch.empty(rows, counts.queries, head_dim, dtype=heads.dtype, device=heads.device)
        kernel = _kernel(head_dim, bits, DTYPES[heads.dtype], int(norms is not None))
        kernel.launch(
            (rows, -(-count // HEADS_AT_ONCE), 1),
            (HEADS_AT_ONCE * LANES, 1, 1),
            heads,
            cos,
            sin,
            slots,
            None if norms is None else norms.q_weight,
            None if norms is None else norms.k_weight,
            q,
            codes,
            scales,
            counts.queries,
            counts.kv,
            counts.query_scale,
            0.0 if norms is None else norms.eps,
            launch_dependents=True,
        )
        return q
