"""The ops that a model's layers run with besides their linears, and how they are chosen: the fast
ones, CUDA kernels where none refuses, or the exact ones (batch-invariant, fp32).

Knows devices, dtypes and shapes; knows no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine_actor import ops

LayerCache = Any
"""One layer's KV cache: a tensor, or Int8KV for ops that were chosen for one."""
AttentionFn = Callable[[torch.Tensor, LayerCache, ops.AttentionPlan], torch.Tensor]
PlanFn = Callable[..., ops.AttentionPlan]
"""As ops.plan_attention; static_prompts: as ops.static_prompts_cuda."""
StaticPlanFn = Callable[[torch.Tensor, torch.Tensor, int, int, int | None], ops.AttentionPlan]
"""As ops.static_plan_cuda."""
PrepareStoreFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ops.HeadLayout], ops.StoreFn]
"""(cos, sin, slots, layout) of one forward -> what stores its heads."""
PrepareHeadsFn = Callable[
    [torch.Tensor, torch.Tensor, ops.AttentionPlan, ops.HeadLayout], ops.HeadsFn
]
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

    def key(self, op: str) -> ops.OpKey:
        """The question to a backend of `op`."""
        kind, name = self.device.type, str(self.dtype).removeprefix("torch.")
        return ops.OpKey(op, kind, name, n=self.block_tokens, k=self.head_dim, bits=self.bits)


@dataclass(frozen=True, slots=True)
class OpSet:
    """The ops of one numerics mode besides the linears. prepare_store: rotation and KV write in one
    kernel, None where they are two steps (rows.rotation, write_kv). static_plan: for decodes whose
    lengths change under a captured graph, None where each step needs a plan of its own;
    static_prompts: the same for prompts. prepare_heads: for such a decode, storing and attending in
    one kernel.
    """

    rows: ops.RowOps
    attention: AttentionFn
    plan: PlanFn = ops.plan_attention
    prepare_store: PrepareStoreFn | None = None
    static_plan: StaticPlanFn | None = None
    prepare_heads: PrepareHeadsFn | None = None
    static_prompts: PlanFn | None = None


FUSED_DECODE = True
"""Decoded rows of a bucket go from their heads to attention in one launch; off, in the two that a
prompt's rows take, for comparison."""
CUDA_ATTENTION = ops.CudaAttention()
CUDA_ROWS = ops.CudaRows()
CUDA_STORE = ops.CudaStore()


def choose_ops(exact: bool, shape: LayerShape | None = None) -> OpSet:
    """exact: batch-invariant fp32; else the fastest for `shape`, or what runs anywhere without."""
    if exact:
        return OpSet(ops.ExactRows(), ops.attention_exact)
    anywhere = OpSet(ops.FastRows(), ops.attention_sdpa)
    if shape is None or any(verdict.refusal for verdict in explain_layer(shape)):
        return anywhere
    rows = ops.CudaRows(narrow=shape.dtype) if shape.wide else CUDA_ROWS
    heads = _prepare_heads if FUSED_DECODE else None
    static = ops.static_plan_cuda, heads, ops.static_prompts_cuda
    return OpSet(rows, CUDA_ATTENTION, ops.plan_attention_cuda, _prepare_store, *static)


def explain_layer(shape: LayerShape) -> tuple[ops.Verdict, ...]:
    """Why a layer may not use its CUDA kernels: the compiler's reason, then each part's."""
    missing = ops.why_no_jit() if shape.device.type == "cuda" else None
    backends = ("attention", CUDA_ATTENTION), ("store", CUDA_STORE), ("rows", CUDA_ROWS)
    parts = tuple(
        verdict for op, backend in backends for verdict in ops.explain((backend,), shape.key(op))
    )
    return (ops.Verdict("cuda.jit", missing), *parts)


def _prepare_store(
    cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, layout: ops.HeadLayout
) -> ops.StoreFn:
    counts = ops.HeadCounts(layout.queries, layout.kv, layout.query_scale)
    return CUDA_STORE.prepare(cos, sin, slots, counts)


def _prepare_heads(
    cos: torch.Tensor, sin: torch.Tensor, plan: ops.AttentionPlan, layout: ops.HeadLayout
) -> ops.HeadsFn:
    assert isinstance(plan, ops.CudaPlan)
    return ops.DecodeHeads(cos, sin, plan, layout.queries, layout.kv, layout.query_scale)
