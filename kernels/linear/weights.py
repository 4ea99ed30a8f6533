"""The two kinds of weights a linear backend is given, and the few questions asked of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kernels.pack.dense_linear import DenseLinear
from kernels.pack.dequantise import dequantise, slice_rows
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.device import compute_capability
from kernels.spec.op import OpKey

Weights = PackedLinear | DenseLinear
LinearFn = Callable[[torch.Tensor], torch.Tensor]
"""x [M, K] -> y [M, N]. Takes any float dtype; each backend says which dtype it returns."""


def write_into(run: LinearFn, x: torch.Tensor, y: torch.Tensor) -> None:
    """run(x) into y, contiguous fp32 [M, N]. A prepared layer that can store its sums as they are
    says so by a method `into`.
    """
    into: Callable[[torch.Tensor, torch.Tensor], None] | None = getattr(run, "into", None)
    if into is None:
        y.copy_(run(x))
    else:
        into(x, y)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16": how OpKey writes dtypes."""
    return str(dtype).removeprefix("torch.")


def linear_key(weights: Weights, dtype: torch.dtype, device: torch.device, exact: bool) -> OpKey:
    """The question that a layer with these weights asks of a backend; `m` is left open."""
    packed = weights if isinstance(weights, PackedLinear) else None
    return OpKey(
        op="linear",
        device=device.type,
        dtype=dtype_name(dtype),
        n=weights.out_features,
        k=weights.in_features,
        bits=packed.bits if packed else 0,
        group=packed.group_size if packed else 0,
        exact=exact,
        affine=_affine(packed),
        perm=packed is not None and packed.perm is not None,
        sm=compute_capability(device),
    )


def _affine(packed: PackedLinear | None) -> str:
    if packed is None:
        return ""
    if packed.offsets is not None:
        return "offsets"
    return "zeros" if packed.zeros is not None else ""


CODES_AT_ONCE = 1 << 22
"""Made dense at a time: bounds the scratch."""
DENSE_SCRATCH_BYTES = 16 * CODES_AT_ONCE
"""Memory that dense_weight() needs beside a packed layer and what it becomes, at most."""


def dense_weight(weights: Weights) -> torch.Tensor:
    """[N, K]: fp32 from packed codes, else the tensor as it is."""
    if not isinstance(weights, PackedLinear):
        return weights.weight
    count, columns = weights.out_features, weights.in_features
    step = max(1, CODES_AT_ONCE // columns)
    if step >= count:
        return dequantise(weights)
    dense = torch.empty(count, columns, device=weights.qweight.device)
    for first in range(0, count, step):
        last = min(first + step, count)
        dense[first:last] = dequantise(slice_rows(weights, first, last))
    return dense


AnyWeights = TypeVar("AnyWeights", bound=PackedLinear | DenseLinear)


def moved(weights: AnyWeights, device: torch.device) -> AnyWeights:
    """The same layer with every tensor on `device`."""
    tensors: dict[str, Any] = {
        field.name: value.to(device)
        for field in dataclasses.fields(weights)
        if isinstance(value := getattr(weights, field.name), torch.Tensor)
    }
    return dataclasses.replace(weights, **tensors)
