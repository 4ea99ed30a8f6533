"""Linear backends over a dense weight matrix, made once at load.

`dense`: torch's own GEMM in the activations' dtype. `cpu.half`: weights in fp16, activations and
sums in fp32 (FBGEMM); half the bytes of fp32 at fp32-like speed, so on CPUs without bf16 units it
wins as soon as several rows share one read of the weights (docs/log.md).
"""

from __future__ import annotations

import torch

from kernels.linear.weights import LinearFn, Weights, dense_weight
from kernels.spec.op import OpKey

HALF_MAX = 65504.0


class Dense:
    """F.linear in `dtype`: activations are cast to it, and y has it."""

    name = "dense"

    def refuse(self, key: OpKey) -> str | None:
        return "batch-dependent sums" if key.exact else None

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        weight = dense_weight(weights).to(dtype).contiguous()
        bias = None if weights.bias is None else weights.bias.to(dtype)

        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x.to(dtype), weight, bias)

        return run


class CpuHalf:
    """fp16 weights, fp32 activations, fp32 y."""

    name = "cpu.half"

    def refuse(self, key: OpKey) -> str | None:
        if key.exact:
            return "batch-dependent sums"
        if key.device != "cpu":
            return "runs on a CPU only"
        if not half_is_available():
            return "this torch build has no FBGEMM"
        return None

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        """Raises ValueError where a weight does not fit fp16; FBGEMM would clamp it silently."""
        weight = dense_weight(weights).float().contiguous()
        if weight.numel() and float(weight.abs().max()) > HALF_MAX:
            raise ValueError("a weight is larger than fp16 can hold")
        bias = None if weights.bias is None else weights.bias.float()
        packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        call = torch.ops.quantized.linear_dynamic_fp16.default

        def run(x: torch.Tensor) -> torch.Tensor:
            return call(x.float(), packed)

        return run


def half_is_available() -> bool:
    """True where this torch can run FBGEMM's fp16 linear."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch.ops.quantized, "linear_dynamic_fp16"
    )
