"""Everything the engine uses of `kernels`, imported in this one place.

Knows the two sets of ops: fast, and exact (batch-invariant, fp32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_actor._mount import mount

mount()

from kernels.attention.exact import attention_exact  # noqa: E402
from kernels.attention.op import AttentionPlan, plan_attention  # noqa: E402
from kernels.attention.sdpa import attention_sdpa  # noqa: E402
from kernels.elementwise.exact import ExactRows  # noqa: E402
from kernels.elementwise.fast import FastRows  # noqa: E402
from kernels.elementwise.op import HeadLayout, RowFn, RowOps  # noqa: E402
from kernels.kv.op import WritePlan, plan_write, write_kv  # noqa: E402
from kernels.linear.op import (  # noqa: E402
    CPU_HALF,
    DENSE,
    Linear,
    LinearBackend,
    LinearPolicy,
    explain_linear,
    prepare_linear,
)
from kernels.linear.probe import crossover, fastest_dense  # noqa: E402
from kernels.linear.tune import Shape as LinearShape  # noqa: E402
from kernels.linear.tune import tune_this_card  # noqa: E402
from kernels.linear.weights import moved  # noqa: E402
from kernels.native.layers import MOST_ROWS as NATIVE_MOST_ROWS  # noqa: E402
from kernels.native.layers import (  # noqa: E402
    NativeLayers,
    NativeLayerWeights,
    NativeShape,
    NativeStep,
)
from kernels.native.layers import refuse_layers as refuse_native_layers  # noqa: E402
from kernels.pack.dense_linear import DenseLinear  # noqa: E402
from kernels.pack.dequantise import dequantise, gather_rows, pack_codes, slice_rows  # noqa: E402
from kernels.pack.packed_linear import PackedLinear  # noqa: E402
from kernels.spec.device import DeviceInfo, cuda_devices, device_info  # noqa: E402
from kernels.spec.registry import Verdict  # noqa: E402

__all__ = [
    "CPU_HALF",
    "DENSE",
    "NATIVE_MOST_ROWS",
    "AttentionFn",
    "AttentionPlan",
    "DenseLinear",
    "HeadLayout",
    "DeviceInfo",
    "Linear",
    "LinearBackend",
    "LinearPolicy",
    "LinearShape",
    "NativeLayerWeights",
    "NativeLayers",
    "NativeShape",
    "NativeStep",
    "OpSet",
    "PackedLinear",
    "RowFn",
    "RowOps",
    "Verdict",
    "WritePlan",
    "cuda_devices",
    "crossover",
    "dequantise",
    "fastest_dense",
    "device_info",
    "explain_linear",
    "gather_rows",
    "moved",
    "op_set",
    "pack_codes",
    "plan_attention",
    "plan_write",
    "prepare_linear",
    "refuse_native_layers",
    "slice_rows",
    "tune_this_card",
    "write_kv",
]

AttentionFn = Callable[[torch.Tensor, torch.Tensor, AttentionPlan], torch.Tensor]


@dataclass(frozen=True, slots=True)
class OpSet:
    """The ops of one numerics mode besides the linears."""

    rows: RowOps
    attention: AttentionFn


def op_set(exact: bool) -> OpSet:
    """exact: batch-invariant fp32; else the fastest."""
    if exact:
        return OpSet(ExactRows(), attention_exact)
    return OpSet(FastRows(), attention_sdpa)
