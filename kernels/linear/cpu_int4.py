"""Few rows on a CPU: torch's int4 kernel, bf16 activations, fp32 sums.

It reads half a byte per weight, so one decoded token costs little more than that read. W4 and W3
codes fit (w = (u - 8) * s + o with unsigned u); zeros are folded into o at load. Only bf16 is
optimised in torch, and it wants N % 16 == 0 and one of four group sizes that divides K.
"""

from __future__ import annotations

import torch

from kernels.linear.weights import LinearFn, Weights
from kernels.pack.dense_linear import DenseLinear
from kernels.pack.dequantise import unpack_codes
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.op import OpKey

GROUPS = (256, 128, 64, 32)
ROW_MULTIPLE = 16
MIDDLE = 8
"""The kernel's codes are 0..15 and it subtracts 8; ours are two's complement."""


class CpuInt4:
    """y in bf16, whatever the dtype of x."""

    name = "cpu.int4"

    def refuse(self, key: OpKey) -> str | None:
        if key.exact:
            return "bf16 activations, batch-dependent sums"
        if key.device != "cpu":
            return "runs on a CPU only"
        if key.bits not in (3, 4):
            return f"holds 3 or 4 bits, not {key.bits or 'dense weights'}"
        if not hasattr(torch, "_weight_int4pack_mm_for_cpu"):
            return "this torch build lacks the int4 kernel"
        if key.n % ROW_MULTIPLE:
            return f"N = {key.n} is not a multiple of {ROW_MULTIPLE}"
        if kernel_group(key.k, key.group) is None:
            return f"no group of {GROUPS} divides K = {key.k} and group {key.group}"
        return None

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        assert not isinstance(weights, DenseLinear)
        group = kernel_group(weights.in_features, weights.group_size)
        assert group is not None
        codes = unpack_codes(weights).to(torch.int32) + MIDDLE
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = scales_and_offsets(weights, group)
        multiply = torch._weight_int4pack_mm_for_cpu
        perm = None if weights.perm is None else weights.perm.long()
        bias = None if weights.bias is None else weights.bias.to(torch.bfloat16)

        def run(x: torch.Tensor) -> torch.Tensor:
            if perm is not None:
                x = x.index_select(-1, perm)
            y = multiply(x.to(torch.bfloat16), packed, group, scales)
            return y if bias is None else y.add_(bias)

        return run


def kernel_group(k: int, group: int) -> int | None:
    """The largest group the kernel takes that divides K and stays within one of ours, else None.

    A layer in groups of 128 with K = 576 has a short last group; in groups of 64 it has none.
    """
    for size in GROUPS:
        if k % size == 0 and (group % size == 0 or group >= k):
            return size
    return None


def scales_and_offsets(layer: PackedLinear, group: int) -> torch.Tensor:
    """bf16 [K / group, N, 2]: the layer's scales and offsets, repeated for smaller groups."""
    scales = layer.scales.float()
    if layer.offsets is not None:
        offsets = layer.offsets.float()
    elif layer.zeros is not None:
        offsets = -layer.zeros.float() * scales
    else:
        offsets = torch.zeros_like(scales)
    starts = torch.arange(0, layer.in_features, group, device=scales.device)
    columns = starts // layer.group_size
    pairs = torch.stack((scales[:, columns].T, offsets[:, columns].T), dim=-1)
    return pairs.to(torch.bfloat16).contiguous()
