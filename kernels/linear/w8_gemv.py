"""Few rows times 8-bit weights on CUDA: the INT8 head. w8_gemv.cu reads the bytes as they lie."""

from __future__ import annotations

from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.linear.reference import Dequantise
from kernels.linear.weights import LinearFn, Weights
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.op import OpKey

SOURCE = CudaSource("linear/w8_gemv.cu")
MOST_ROWS = 16
ROWS_A_BLOCK = 16
THREADS = 256
CHUNKS = (64, 32)
DTYPES = {torch.float16: 0, torch.bfloat16: 1}


def variant(bf16: int, batches: int, chunk: int, wide: int = 0) -> Variant:
    """The compiled kernel for up to 8 * batches rows and groups that `chunk` divides. wide: y in
    fp32.
    """
    defines = {"BF16": bf16, "BATCHES": batches, "CHUNK": chunk, "WIDE": wide}
    registers = 64 if batches == 1 else 128
    return Variant(SOURCE, "w8_gemv", defines, max_registers=registers, threads=THREADS)


SHIPPED = tuple(
    variant(bf16, batches, chunk, wide)
    for bf16 in (0, 1)
    for batches in (1, 2)
    for chunk in CHUNKS
    for wide in (0, 1)
)


@cache
def _kernel(bf16: int, batches: int, chunk: int, wide: int) -> Kernel:
    return variant(bf16, batches, chunk, wide).kernel()


def _chunk(k: int, group: int) -> int | None:
    """Columns of one step: what divides the groups, of which the row holds whole ones."""
    return next((chunk for chunk in CHUNKS if k % group == 0 and group % chunk == 0), None)


def refuse_all_but_int8(key: OpKey, exact: str) -> str | None:
    """What every kernel of 8-bit codes refuses first. exact: why it cannot be exact."""
    if key.device != "cuda":
        return "runs on a GPU only"
    if key.exact:
        return exact
    if key.bits != 8:
        return f"holds 8 bits, not {key.bits or 'dense weights'}"
    if key.dtype not in ("float16", "bfloat16"):
        return f"multiplies in half precision, not {key.dtype}"
    if key.affine:
        return f"scales only, no {key.affine}"
    return None


class W8Gemv:
    """y in the activations' dtype; more rows than 16 go through a dequantised copy of the rows."""

    name = "cuda.w8_gemv"

    def refuse(self, key: OpKey) -> str | None:
        """None where it can; else why not."""
        if reason := refuse_all_but_int8(key, "sums depend on how K is split"):
            return reason
        if key.m > MOST_ROWS:
            return f"serves up to {MOST_ROWS} rows, not {key.m}"
        if _chunk(key.k, key.group) is None:
            return f"K = {key.k} in groups of {key.group} is not whole steps of {CHUNKS[-1]}"
        return None

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        assert isinstance(weights, PackedLinear)
        return W8GemvLinear(weights, dtype)


class W8GemvLinear:
    """A prepared layer. Call it with x [M, K]."""

    def __init__(self, weights: PackedLinear, dtype: torch.dtype) -> None:
        chunk = _chunk(weights.in_features, weights.group_size)
        assert chunk is not None
        self._chunk = chunk
        self._rows, self._group = weights.out_features, weights.group_size
        self._dtype = dtype
        self._many = Dequantise().prepare(weights, dtype)
        self._codes, self._scales = weights.qweight.contiguous(), weights.scales.contiguous()
        self._bias = None if weights.bias is None else weights.bias.to(dtype)
        self._perm = None if weights.perm is None else weights.perm.long()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MOST_ROWS:
            return self._many(x)
        y = torch.empty(x.shape[0], self._rows, dtype=self._dtype, device=x.device)
        self.into(x, y)
        return y

    def into(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Write y [M, N], contiguous, fp32 or the layer's dtype."""
        m, columns = x.shape
        if m > MOST_ROWS:
            y.copy_(self._many(x))
            return
        x = x.to(self._dtype)
        if self._perm is not None:
            x = x.index_select(-1, self._perm)
        wide = int(y.dtype == torch.float32)
        _kernel(DTYPES[self._dtype], 1 + (m > 8), self._chunk, wide).launch(
            (-(-self._rows // ROWS_A_BLOCK), 1, 1),
            (THREADS, 1, 1),
            x.contiguous(),
            self._codes,
            self._scales,
            self._bias,
            y,
            m,
            self._rows,
            columns,
            self._group,
            launch_dependents=True,
        )
