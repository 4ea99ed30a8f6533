"""ops.linear: y = x @ W.T + bias for packed and dense weights, prepared once, called often.

Chooses among the backends of this folder; knows no model and no layer names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.linear.cost import linear_bytes, linear_flops
from kernels.linear.cpu_int4 import CpuInt4
from kernels.linear.cpu_native import CpuNative
from kernels.linear.cuda import ByRows, Cuda
from kernels.linear.dense import CpuHalf, Dense
from kernels.linear.exact import ExactTiles
from kernels.linear.reference import Dequantise, linear_reference
from kernels.linear.row_policy import RowChoice
from kernels.linear.strip_few import StripFew
from kernels.linear.weights import LinearFn, Weights, linear_key, write_into
from kernels.pack.dense_linear import DenseLinear
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.op import OpKey, OpSpec
from kernels.spec.registry import Verdict, choose, explain


class LinearBackend(Protocol):
    """A way to multiply. `prepare` may take seconds and memory; the function it returns is hot."""

    name: str

    def refuse(self, key: OpKey) -> str | None: ...

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn: ...


LINEAR = OpSpec(
    name="linear",
    axes=(("m", "rows of x"), ("n", "out-features"), ("k", "in-features")),
    reference=linear_reference,
    tolerance=(("float32", 2e-5), ("bfloat16", 2e-2), ("float16", 3e-3)),
    bytes_of=linear_bytes,
    flops_of=linear_flops,
)
EXACT = ExactTiles()
DENSE = Dense()
CPU_HALF = CpuHalf()
CPU_NATIVE = CpuNative()
CUDA = Cuda()
PACKED_BACKENDS: tuple[LinearBackend, ...] = (CpuInt4(), CUDA, Dequantise())
"""Ways to multiply packed weights without a dense copy, fastest for few rows first."""


@dataclass(frozen=True, slots=True)
class LinearPolicy:
    """How the linears of one model are to be prepared.

    dtype: of the activations and of dense weights. exact: batch-invariant fp32, everything else is
    ignored. dense: the backend of the dense copy of packed weights for many rows, or None for no
    copy, and the backend of dense weights (None: `dense` in `dtype`). dense_dtype: of that copy.
    few_rows: up to so many rows the packed weights are used where both exist. native: whether our
    own compiled kernels may be used on a CPU. meets_prompts: False for a layer that is asked for
    few rows only, which a native kernel then serves without a dense copy beside it.
    """

    device: torch.device
    dtype: torch.dtype
    exact: bool = False
    dense: LinearBackend | None = None
    dense_dtype: torch.dtype = torch.float32
    few_rows: int = 4
    native: bool = False
    meets_prompts: bool = True


class Linear:
    """A prepared layer. Call it with x [M, K]; y [M, N] has the dtype of the backend that ran.

    `packed` and `dense` are the two functions (either may be None); the number of rows decides.
    gated: W is a fused gate and up, and y is silu(gate) * up, [M, N / 2].
    """

    __slots__ = ("dense", "few_rows", "gated", "in_features", "out_features", "packed")

    def __init__(
        self,
        packed: LinearFn | None,
        dense: LinearFn | None,
        few_rows: int,
        weights: Weights,
        gated: bool = False,
    ) -> None:
        self.gated = gated
        self.packed = packed
        self.dense = dense
        self.few_rows = few_rows
        self.out_features = weights.out_features
        self.in_features = weights.in_features

    @property
    def has_both(self) -> bool:
        """Whether the number of rows decides anything."""
        return self.packed is not None and self.dense is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x.shape[0])(x)

    def into(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Write y, contiguous fp32 [M, N]: without a rounded copy in between where a kernel can."""
        write_into(self._function(x.shape[0]), x, y)

    def carrier(self, rows: int) -> StripFew | None:
        """What runs for so many rows, where it can take the norms beside it upon itself."""
        run: LinearFn | None = self._function(rows)
        if isinstance(run, ByRows):
            run = run.function_of(rows)
        return run if isinstance(run, StripFew) and run.refuse_carry() is None else None

    def _function(self, rows: int) -> LinearFn:
        if self.packed is not None and (self.dense is None or rows <= self.few_rows):
            return self.packed
        assert self.dense is not None
        return self.dense


def prepare_linear(weights: Weights, policy: LinearPolicy) -> Linear:
    """Choose and set up the backends for one layer whose tensors are on `policy.device`."""
    if policy.exact:
        return Linear(None, EXACT.prepare(weights, torch.float32), 0, weights)
    key = linear_key(weights, policy.dtype, policy.device, exact=False)
    if not isinstance(weights, PackedLinear):
        return Linear(None, _prepare_dense(weights, policy), 0, weights)
    packed = choose(_packed_backends(policy), key)
    if policy.dense is None or (packed is CPU_NATIVE and not policy.meets_prompts):
        return Linear(packed.prepare(weights, policy.dtype), None, 0, weights)
    dense = policy.dense.prepare(weights, policy.dense_dtype)
    if isinstance(packed, Dequantise):
        # A dense copy beats making one on every call, whatever the number of rows.
        return Linear(None, dense, 0, weights)
    return Linear(packed.prepare(weights, policy.dtype), dense, policy.few_rows, weights)


def prepare_gate_up(weights: Weights, policy: LinearPolicy) -> Linear:
    """prepare_linear() for a fused gate and up; `gated` where the kernels put the SiLU and the
    product behind their sums, which saves a launch and a round trip through memory.
    """
    if not policy.exact and policy.dense is None and isinstance(weights, PackedLinear):
        key = linear_key(weights, policy.dtype, policy.device, exact=False)
        if choose(_packed_backends(policy), key) is CUDA and CUDA.refuse_gated(key) is None:
            return Linear(CUDA.prepare_gated(weights, policy.dtype), None, 0, weights, gated=True)
    return prepare_linear(weights, policy)


def _packed_backends(policy: LinearPolicy) -> tuple[LinearBackend, ...]:
    return (CPU_NATIVE, *PACKED_BACKENDS) if policy.native else PACKED_BACKENDS


def _prepare_dense(weights: DenseLinear, policy: LinearPolicy) -> LinearFn:
    """fp32 weights stay fp32 on a CPU: whoever published them so is not rounded behind his back."""
    if policy.dense is None or weights.weight.dtype == torch.float32:
        return DENSE.prepare(weights, policy.dtype)
    return policy.dense.prepare(weights, policy.dense_dtype)


def explain_rows(weights: Weights, policy: LinearPolicy) -> tuple[RowChoice, ...]:
    """For which rows which CUDA kernel runs, and on what evidence; empty where none is asked."""
    key = linear_key(weights, policy.dtype, policy.device, policy.exact)
    if policy.exact or CUDA.refuse(key) is not None:
        return ()
    return tuple(choice for _, choice in CUDA.choices(key))


def explain_linear(weights: Weights, policy: LinearPolicy) -> tuple[Verdict, ...]:
    """What every backend says of this layer."""
    key = linear_key(weights, policy.dtype, policy.device, policy.exact)
    native = explain((CPU_NATIVE,), key)
    if not policy.native:
        native = (Verdict(CPU_NATIVE.name, native[0].refusal or "switched off"),)
    others = explain((EXACT, *PACKED_BACKENDS, DENSE, CPU_HALF), key)
    return (others[0], *native, *others[1:])
