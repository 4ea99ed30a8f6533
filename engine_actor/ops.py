"""Everything the engine uses of `kernels`, imported in this one place.

Knows the two sets of ops: fast, and exact (batch-invariant, fp32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine_actor._mount import mount

mount()

from kernels.attention.cuda import (  # noqa: E402
    CudaAttention,
    CudaPlan,
    plan_attention_cuda,
    static_plan_cuda,
)
from kernels.attention.cuda_prompt import JOINED_KEYS, prepare_lengths  # noqa: E402
from kernels.attention.decode_heads import DecodeHeads, HeadsFn, load_decode_heads  # noqa: E402
from kernels.attention.exact import attention_exact  # noqa: E402
from kernels.attention.op import AttentionPlan, plan_attention  # noqa: E402
from kernels.attention.sdpa import attention_sdpa  # noqa: E402
from kernels.attention.static_prompts import static_prompts_cuda  # noqa: E402
from kernels.elementwise.cuda import CudaRows, leave_norm  # noqa: E402
from kernels.elementwise.embedding import gather_rows_cuda  # noqa: E402
from kernels.elementwise.exact import ExactRows  # noqa: E402
from kernels.elementwise.fast import FastRows  # noqa: E402
from kernels.elementwise.op import AddNormFn, HeadLayout, RowFn, RowOps  # noqa: E402
from kernels.jit.availability import why_no_jit  # noqa: E402
from kernels.jit.compile import COMPILED as COMPILED_SECONDS  # noqa: E402
from kernels.jit.driver import LaunchError  # noqa: E402
from kernels.jit.green_contexts import GreenContextRefused, split_card  # noqa: E402
from kernels.jit.host_memory import PinnedBytes  # noqa: E402
from kernels.jit.mapped_memory import CudaMemory, why_no_virtual_memory  # noqa: E402
from kernels.jit.virtual_memory import MemoryDriver, VirtualPool, full_bytes  # noqa: E402
from kernels.kv.cuda import CudaStore, HeadCounts  # noqa: E402
from kernels.kv.fetch import Fetch  # noqa: E402
from kernels.kv.host_copy import (  # noqa: E402
    copy_blocks,
    copy_blocks_plainly,
    load_copy_kernel,
    refuse_copy_kernel,
)
from kernels.kv.op import HeadNorms, StoreFn, WritePlan, plan_write, write_kv  # noqa: E402
from kernels.kv.stage import StagedRows, stage_decode  # noqa: E402
from kernels.kv.stage_prompts import StagedPrompts, stage_prompts  # noqa: E402
from kernels.linear.carry import Carry, refuse_carry  # noqa: E402
from kernels.linear.gemm_plan import is_card_limited, limit_multiprocessors  # noqa: E402
from kernels.linear.op import (  # noqa: E402
    CPU_HALF,
    DENSE,
    Linear,
    LinearBackend,
    LinearPolicy,
    explain_linear,
    explain_rows,
    prepare_gate_up,
    prepare_linear,
)
from kernels.linear.probe import crossover, fastest_dense  # noqa: E402
from kernels.linear.strip import SCRATCH_BYTES as STRIP_SCRATCH_BYTES  # noqa: E402
from kernels.linear.strip import refuse_strips, strip_bytes  # noqa: E402
from kernels.linear.strip_few import StripFew  # noqa: E402
from kernels.linear.tune import Shape as LinearShape  # noqa: E402
from kernels.linear.tune import tune_this_card  # noqa: E402
from kernels.linear.weights import DENSE_SCRATCH_BYTES, moved  # noqa: E402
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
from kernels.pack.int8_kv import Int8KV, empty_int8_kv  # noqa: E402
from kernels.pack.kept_memory import loading_apart  # noqa: E402
from kernels.pack.packed_linear import PackedLinear  # noqa: E402
from kernels.pack.round_columns import (  # noqa: E402
    descend_columns,
    gptq_columns,
    refuse_round_columns,
)
from kernels.sampling.cuda import (  # noqa: E402
    DeviceArgmax,
    DeviceSampler,
    Outcome,
    Sent,
    new_outcome,
)
from kernels.sampling.cuda import room_bytes as sampler_room_bytes  # noqa: E402
from kernels.sampling.op import Draw, Edit, RowPacker  # noqa: E402
from kernels.spec.device import DeviceInfo, cuda_devices, device_info  # noqa: E402
from kernels.spec.op import OpKey  # noqa: E402
from kernels.spec.page_locked import page_locked  # noqa: E402
from kernels.spec.registry import Verdict, explain  # noqa: E402

__all__ = [
    "COMPILED_SECONDS",
    "CPU_HALF",
    "DENSE",
    "DENSE_SCRATCH_BYTES",
    "NATIVE_MOST_ROWS",
    "STRIP_SCRATCH_BYTES",
    "AddNormFn",
    "AttentionFn",
    "AttentionPlan",
    "Carry",
    "CudaMemory",
    "DenseLinear",
    "DeviceArgmax",
    "DeviceSampler",
    "Draw",
    "Edit",
    "GreenContextRefused",
    "HeadLayout",
    "HeadNorms",
    "Fetch",
    "HeadsFn",
    "JOINED_KEYS",
    "Int8KV",
    "LaunchError",
    "LayerCache",
    "DeviceInfo",
    "Linear",
    "LinearBackend",
    "LinearPolicy",
    "LinearShape",
    "LayerShape",
    "MemoryDriver",
    "NativeLayerWeights",
    "NativeLayers",
    "NativeShape",
    "NativeStep",
    "OpSet",
    "Outcome",
    "PackedLinear",
    "PinnedBytes",
    "RowFn",
    "RowPacker",
    "RowOps",
    "Sent",
    "StagedPrompts",
    "StagedRows",
    "StoreFn",
    "StripFew",
    "Verdict",
    "VirtualPool",
    "WritePlan",
    "copy_blocks",
    "copy_blocks_plainly",
    "cuda_devices",
    "crossover",
    "dequantise",
    "descend_columns",
    "fastest_dense",
    "full_bytes",
    "device_info",
    "empty_int8_kv",
    "explain_layer",
    "explain_linear",
    "explain_rows",
    "gather_rows",
    "gather_rows_cuda",
    "gptq_columns",
    "is_card_limited",
    "leave_norm",
    "limit_multiprocessors",
    "load_copy_kernel",
    "load_decode_heads",
    "loading_apart",
    "moved",
    "new_outcome",
    "op_set",
    "pack_codes",
    "page_locked",
    "plan_attention",
    "plan_write",
    "prepare_gate_up",
    "prepare_lengths",
    "prepare_linear",
    "refuse_carry",
    "refuse_copy_kernel",
    "refuse_native_layers",
    "refuse_round_columns",
    "sampler_room_bytes",
    "refuse_strips",
    "slice_rows",
    "split_card",
    "stage_decode",
    "stage_prompts",
    "strip_bytes",
    "tune_this_card",
    "why_no_jit",
    "why_no_virtual_memory",
    "write_kv",
]

LayerCache = Any
"""One layer's KV cache: a tensor, or Int8KV for ops that were chosen for one."""
AttentionFn = Callable[[torch.Tensor, LayerCache, AttentionPlan], torch.Tensor]
PlanFn = Callable[..., AttentionPlan]
"""As plan_attention; static_prompts: as static_prompts_cuda."""
StaticPlanFn = Callable[[torch.Tensor, torch.Tensor, int, int, int | None], AttentionPlan]
"""As static_plan_cuda."""
PrepareStoreFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, HeadLayout], StoreFn]
"""(cos, sin, slots, layout) of one forward -> what stores its heads."""
PrepareHeadsFn = Callable[[torch.Tensor, torch.Tensor, AttentionPlan, HeadLayout], HeadsFn]
"""(cos, sin, plan, layout) of a decode -> what stores and attends its heads."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the choice of a model's ops depends on. dtype: of activations and KV cache alike, else
    there is no kernel. bits: 8 for an INT8 cache, else 0. wide: the residual stream is fp32.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    block_tokens: int
    bits: int = 0
    wide: bool = False

    def key(self, op: str) -> OpKey:
        """The question to a backend of `op`."""
        kind, name = self.device.type, str(self.dtype).removeprefix("torch.")
        return OpKey(op, kind, name, n=self.block_tokens, k=self.head_dim, bits=self.bits)


@dataclass(frozen=True, slots=True)
class OpSet:
    """The ops of one numerics mode besides the linears. prepare_store: rotation and KV write in one
    kernel, None where they are two steps (rows.rotation, write_kv). static_plan: for decodes whose
    lengths change under a captured graph, None where each step needs a plan of its own;
    static_prompts: the same for prompts. prepare_heads: for such a decode, storing and attending in
    one kernel.
    """

    rows: RowOps
    attention: AttentionFn
    plan: PlanFn = plan_attention
    prepare_store: PrepareStoreFn | None = None
    static_plan: StaticPlanFn | None = None
    prepare_heads: PrepareHeadsFn | None = None
    static_prompts: PlanFn | None = None


FUSED_DECODE = True
"""Decoded rows of a bucket go from their heads to attention in one launch; off, in the two that a
prompt's rows take, for comparison."""
CUDA_ATTENTION = CudaAttention()
CUDA_ROWS = CudaRows()
CUDA_STORE = CudaStore()


def op_set(exact: bool, shape: LayerShape | None = None) -> OpSet:
    """exact: batch-invariant fp32; else the fastest for `shape`, or what runs anywhere without."""
    if exact:
        return OpSet(ExactRows(), attention_exact)
    anywhere = OpSet(FastRows(), attention_sdpa)
    if shape is None or any(verdict.refusal for verdict in explain_layer(shape)):
        return anywhere
    rows = CudaRows(narrow=shape.dtype) if shape.wide else CUDA_ROWS
    heads = _prepare_heads if FUSED_DECODE else None
    static = static_plan_cuda, heads, static_prompts_cuda
    return OpSet(rows, CUDA_ATTENTION, plan_attention_cuda, _prepare_store, *static)


def explain_layer(shape: LayerShape) -> tuple[Verdict, ...]:
    """Why a layer may not use its CUDA kernels: the compiler's reason, then each part's."""
    missing = why_no_jit() if shape.device.type == "cuda" else None
    backends = ("attention", CUDA_ATTENTION), ("store", CUDA_STORE), ("rows", CUDA_ROWS)
    parts = tuple(
        verdict for op, backend in backends for verdict in explain((backend,), shape.key(op))
    )
    return (Verdict("cuda.jit", missing), *parts)


def _prepare_store(
    cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, layout: HeadLayout
) -> StoreFn:
    counts = HeadCounts(layout.queries, layout.kv, layout.query_scale)
    return CUDA_STORE.prepare(cos, sin, slots, counts)


def _prepare_heads(
    cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan, layout: HeadLayout
) -> HeadsFn:
    assert isinstance(plan, CudaPlan)
    return DecodeHeads(cos, sin, plan, layout.queries, layout.kv, layout.query_scale)
