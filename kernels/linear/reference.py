"""The linear backend that never refuses: dequantise on every call, a slice of rows at a time.

Slow by design on a CPU, where it is a test oracle; on a GPU it serves until a kernel does better.
"""

from __future__ import annotations

import torch

from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.pack.dequantise import dequantise, slice_rows
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.op import OpKey

ROWS_PER_SLICE = 8192
"""Out-features dequantised at once: bounds the fp32 scratch to ROWS_PER_SLICE * K * 4 bytes."""


def linear_reference(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """fp32 y = x @ W.T + bias, straight from the definition. x [M, K] -> [M, N]."""
    weight = dequantise(weights) if isinstance(weights, PackedLinear) else weights.weight
    y = x.float() @ weight.float().T
    return y if weights.bias is None else y + weights.bias.float()


class Dequantise:
    """y in the dtype of x; the weights are made in that dtype slice by slice."""

    name = "reference.dequantise"

    def refuse(self, key: OpKey) -> str | None:
        return None

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        if isinstance(weights, DenseLinear):
            return _dense(weights)
        return _sliced(weights)


def _dense(layer: DenseLinear) -> LinearFn:
    def run(x: torch.Tensor) -> torch.Tensor:
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return torch.nn.functional.linear(x, layer.weight.to(x.dtype), bias)

    return run


def _sliced(layer: PackedLinear) -> LinearFn:
    bounds = range(0, layer.out_features, ROWS_PER_SLICE)
    slices = [slice_rows(layer, first, first + ROWS_PER_SLICE) for first in bounds]

    def run(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.nn.functional.linear(x, dequantise(part).to(x.dtype)) for part in slices]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if layer.bias is None else y + layer.bias.to(x.dtype)

    return run
