"""Packed weights on a GPU: every CUDA backend, and the layer that picks one by the number of rows.

A layer is prepared once for every backend that its policy will ever call; a call then costs one
look-up. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch

from kernels.jit.availability import why_no_jit
from kernels.linear.dequantise_cublas import DequantiseCublas
from kernels.linear.row_policy import MOST_ROWS, ROWS_ONE_BY_ONE, Policy, RowChoice, row_choices
from kernels.linear.seed import SeedBatchTile, SeedGemv, SeedTiled
from kernels.linear.strip import STRIP_ROWS, StripWeights, interleave_halves, to_strips
from kernels.linear.strip_dense import StripCublas
from kernels.linear.strip_few import FewRows
from kernels.linear.strip_gemm import GemmAmpere
from kernels.linear.strip_gemm_hopper import GemmHopper
from kernels.linear.strip_order import OrderedRows
from kernels.linear.strip_stream_rows import StreamRows
from kernels.linear.w8_gemv import W8Gemv
from kernels.linear.w8_rows import W8Rows
from kernels.linear.weights import LinearFn, Weights, linear_key, write_into
from kernels.pack.dense_linear import DenseLinear
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.device import card_name
from kernels.spec.op import OpKey
from kernels.spec.registry import NoBackend
from kernels.spec.tuned import tuned_tables


class CudaBackend(Protocol):
    """As LinearBackend of kernels/linear/op.py; refuse() is asked with the number of rows."""

    @property
    def name(self) -> str: ...

    def refuse(self, key: OpKey) -> str | None: ...

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn: ...


@runtime_checkable
class StripBackend(Protocol):
    """One that reads strips: several of them then share one re-laid copy of a layer. gated: the
    strips are a fused gate and up, interleaved, and y is silu(gate) * up, [M, N / 2].
    """

    def prepare_strips(
        self, strips: StripWeights, dtype: torch.dtype, *, gated: bool = False
    ) -> LinearFn: ...


BACKENDS: tuple[CudaBackend, ...] = (
    W8Gemv(),
    W8Rows(),
    FewRows(),
    StreamRows(),
    OrderedRows(),
    GemmHopper(),
    GemmAmpere(),
    StripCublas(),
    SeedTiled(),
    SeedBatchTile(4),
    SeedGemv(),
    DequantiseCublas(),
)
"""In the order in which they are asked where no tuned row speaks of a shape."""
EXPERIMENTS: tuple[CudaBackend, ...] = (
    SeedBatchTile(3),
    SeedTiled(1),
    SeedTiled(2),
    SeedTiled(3),
)
"""Correct, tested, measured, and chosen by nobody."""


class Cuda:
    """y in fp16, or in the dtype of x where the weights are made dense."""

    def __init__(
        self, policy: Policy = "tuned", backends: Sequence[CudaBackend] = BACKENDS
    ) -> None:
        self.name = f"cuda.{policy}"
        self.policy: Policy = policy
        self.backends = tuple(backends)

    def refuse(self, key: OpKey) -> str | None:
        """Without key.m, whether every number of rows has a backend."""
        if key.device != "cuda":
            return "runs on a GPU only"
        missing = why_no_jit()
        if missing is not None:
            return missing
        try:
            self.choices(key)
        except NoBackend as error:
            return str(error)
        return None

    def choices(self, key: OpKey) -> list[tuple[CudaBackend, RowChoice]]:
        """What would run for which rows, and why. Raises NoBackend."""
        return _choices(self.backends, replace(self._asked(key), m=0), self.policy)

    def _asked(self, key: OpKey) -> OpKey:
        """bf16 activations are cast on the way in and out, which costs less than dense weights do;
        the seed makes the weights dense for anything but fp16.
        """
        if self.policy == "tuned" and key.dtype == "bfloat16":
            return replace(key, dtype="float16")
        return key

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        assert not isinstance(weights, DenseLinear)
        return self._prepare(weights, dtype, gated=False)

    def refuse_gated(self, key: OpKey) -> str | None:
        """Why prepare_gated() cannot be called for such a layer, else None."""
        refusal = self.refuse(key)
        if refusal is not None:
            return refusal
        if key.n % STRIP_ROWS:
            return f"gate and up have {key.n} rows together, not a multiple of {STRIP_ROWS}"
        other = [
            backend.name
            for backend, _ in self.choices(key)
            if not isinstance(backend, StripBackend)
        ]
        return f"{other[0]} reads no strips" if other else None

    def prepare_gated(self, weights: PackedLinear, dtype: torch.dtype) -> LinearFn:
        """silu(gate) * up of a fused gate and up, formed where each kernel adds up: every number of
        rows reads the same interleaved strips.
        """
        return self._prepare(weights, dtype, gated=True)

    def _prepare(self, weights: PackedLinear, dtype: torch.dtype, gated: bool) -> LinearFn:
        key = linear_key(weights, dtype, weights.qweight.device, exact=False)
        prepared = _Prepared(weights, dtype, key, gated)
        few: list[LinearFn] = []
        many: dict[int, LinearFn] = {}
        for backend, choice in self.choices(key):
            run = prepared.function_of(backend)
            few += [run] * (min(choice.last, ROWS_ONE_BY_ONE) - len(few))
            for length in range(choice.first.bit_length(), choice.last.bit_length() + 1):
                many[length] = run
        return _by_rows([few[0], *few], many)


class _Prepared:
    """The functions of one layer, each made when it is first asked for."""

    def __init__(self, weights: PackedLinear, dtype: torch.dtype, key: OpKey, gated: bool) -> None:
        self._weights = interleave_halves(weights) if gated else weights
        self._gated = gated
        self._dtype = dtype
        self._key = key
        self._strips: StripWeights | None = None
        self._functions: dict[str, LinearFn] = {}

    def function_of(self, backend: CudaBackend) -> LinearFn:
        """The backend's function; through fp16 where it does not take the layer's dtype."""
        if backend.name not in self._functions:
            run = self._prepare(backend)
            is_native = backend.refuse(self._key) is None
            self._functions[backend.name] = run if is_native else _through_half(run, self._dtype)
        return self._functions[backend.name]

    def _prepare(self, backend: CudaBackend) -> LinearFn:
        if not isinstance(backend, StripBackend):
            return backend.prepare(self._weights, self._dtype)
        if self._strips is None:
            self._strips = to_strips(self._weights)
        return backend.prepare_strips(self._strips, self._dtype, gated=self._gated)


def _through_half(run: LinearFn, dtype: torch.dtype) -> LinearFn:
    return lambda x: run(x.to(torch.float16)).to(dtype)


def _by_rows(few: list[LinearFn], many: dict[int, LinearFn]) -> LinearFn:
    """few[m] for m up to ROWS_ONE_BY_ONE, above it many[number of bits of m]."""
    if len(set(map(id, (*few, *many.values())))) == 1:
        return few[0]
    return ByRows(few, many)


class ByRows:
    """One look-up, then the function of that many rows."""

    def __init__(self, few: list[LinearFn], many: dict[int, LinearFn]) -> None:
        self._few = few
        self._many = many

    def function_of(self, rows: int) -> LinearFn:
        """What runs for so many rows."""
        return self._few[rows] if rows <= ROWS_ONE_BY_ONE else self._many[rows.bit_length()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function_of(x.shape[0])(x)

    def into(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """See weights.write_into."""
        write_into(self.function_of(x.shape[0]), x, y)


@lru_cache(maxsize=256)
def _choices(
    backends: tuple[CudaBackend, ...], key: OpKey, policy: Policy
) -> list[tuple[CudaBackend, RowChoice]]:
    """A model has a handful of shapes and hundreds of layers."""
    name = card_name() if key.sm else ""
    return row_choices(backends, key, policy, tuned_tables(key.sm, name))


assert MOST_ROWS.bit_length() > ROWS_ONE_BY_ONE.bit_length()
