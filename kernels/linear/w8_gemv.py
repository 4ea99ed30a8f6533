"""Few rows times 8-bit weights on CUDA: the INT8 head. w8_gemv.cu reads the bytes as they lie."""

from __future__ import annotations

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.linear.reference import Dequantise
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.op import OpKey

SOURCE = CudaSource("linear/w8_gemv.cu")
MOST_ROWS = 16
ROWS_A_BLOCK = 32
THREADS = 128
CHUNKS = (64, 32)
DTYPES = {torch.float16: 0, torch.bfloat16: 1}


def variant(bf16: int, batches: int, chunk: int) -> Variant:
    """The compiled kernel for up to 8 * batches rows and groups that `chunk` divides."""
    defines = {"BF16": bf16, "BATCHES": batches, "CHUNK": chunk}
    return Variant(SOURCE, "w8_gemv", defines, max_registers=168, threads=THREADS)


SHIPPED = tuple(
    variant(bf16, batches, chunk) for bf16 in (0, 1) for batches in (1, 2) for chunk in CHUNKS
)


def _chunk(k: int, group: int) -> int | None:
    """Columns of one step: what divides the groups, of which the row holds whole ones."""
    return next((chunk for chunk in CHUNKS if k % group == 0 and group % chunk == 0), None)


class W8Gemv:
    """y in the activations' dtype; more rows than 16 go through a dequantised copy of the rows."""

    name = "cuda.w8_gemv"

    def refuse(self, key: OpKey) -> str | None:
        """None where it can; else why not."""
        if key.device != "cuda":
            return "runs on a GPU only"
        if key.exact:
            return "sums depend on how K is split"
        if key.bits != 8:
            return f"holds 8 bits, not {key.bits or 'dense weights'}"
        if key.dtype not in ("float16", "bfloat16"):
            return f"multiplies in half precision, not {key.dtype}"
        if key.affine:
            return f"scales only, no {key.affine}"
        if key.m > MOST_ROWS:
            return f"serves up to {MOST_ROWS} rows, not {key.m}"
        if _chunk(key.k, key.group) is None:
            return f"K = {key.k} in groups of {key.group} is not whole steps of {CHUNKS[-1]}"
        return None

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        assert isinstance(weights, PackedLinear)
        rows, columns, group = weights.out_features, weights.in_features, weights.group_size
        chunk = _chunk(columns, group)
        assert chunk is not None
        kernels = [variant(DTYPES[dtype], batches, chunk).kernel() for batches in (1, 2)]
        many = Dequantise().prepare(weights, dtype)
        codes, scales = weights.qweight.contiguous(), weights.scales.contiguous()
        bias = None if weights.bias is None else weights.bias.to(dtype)
        perm = None if weights.perm is None else weights.perm.long()

        def run(x: torch.Tensor) -> torch.Tensor:
            m = x.shape[0]
            if m > MOST_ROWS:
                return many(x)
            x = x.to(dtype)
            if perm is not None:
                x = x.index_select(-1, perm)
            y = torch.empty(m, rows, dtype=dtype, device=x.device)
            kernel: Kernel = kernels[m > 8]
            kernel.launch(
                (-(-rows // ROWS_A_BLOCK), 1, 1),
                (THREADS, 1, 1),
                x.contiguous(),
                codes,
                scales,
                bias,
                y,
                m,
                rows,
                columns,
                group,
                launch_dependents=True,
            )
            return y

        return run
