"""Everything the engine uses of `kernels`, imported in this one place.

Knows no model: which of them its layers run with is chosen in model/layer_ops.py.
"""

from __future__ import annotations

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
    "JOINED_KEYS",
    "NATIVE_MOST_ROWS",
    "STRIP_SCRATCH_BYTES",
    "AddNormFn",
    "AttentionPlan",
    "Carry",
    "CudaAttention",
    "CudaMemory",
    "CudaPlan",
    "CudaRows",
    "CudaStore",
    "DecodeHeads",
    "DenseLinear",
    "DeviceArgmax",
    "DeviceInfo",
    "DeviceSampler",
    "Draw",
    "Edit",
    "ExactRows",
    "FastRows",
    "Fetch",
    "GreenContextRefused",
    "HeadCounts",
    "HeadLayout",
    "HeadNorms",
    "HeadsFn",
    "Int8KV",
    "LaunchError",
    "Linear",
    "LinearBackend",
    "LinearPolicy",
    "LinearShape",
    "MemoryDriver",
    "NativeLayerWeights",
    "NativeLayers",
    "NativeShape",
    "NativeStep",
    "OpKey",
    "Outcome",
    "PackedLinear",
    "PinnedBytes",
    "RowFn",
    "RowOps",
    "RowPacker",
    "Sent",
    "StagedPrompts",
    "StagedRows",
    "StoreFn",
    "StripFew",
    "Verdict",
    "VirtualPool",
    "WritePlan",
    "attention_exact",
    "attention_sdpa",
    "copy_blocks",
    "copy_blocks_plainly",
    "crossover",
    "cuda_devices",
    "dequantise",
    "descend_columns",
    "device_info",
    "empty_int8_kv",
    "explain",
    "explain_linear",
    "explain_rows",
    "fastest_dense",
    "full_bytes",
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
    "pack_codes",
    "page_locked",
    "plan_attention",
    "plan_attention_cuda",
    "plan_write",
    "prepare_gate_up",
    "prepare_lengths",
    "prepare_linear",
    "refuse_carry",
    "refuse_copy_kernel",
    "refuse_native_layers",
    "refuse_round_columns",
    "refuse_strips",
    "sampler_room_bytes",
    "slice_rows",
    "split_card",
    "stage_decode",
    "stage_prompts",
    "static_plan_cuda",
    "static_prompts_cuda",
    "strip_bytes",
    "tune_this_card",
    "why_no_jit",
    "why_no_virtual_memory",
    "write_kv",
]
