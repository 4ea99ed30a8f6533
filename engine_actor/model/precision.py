"""Which dtype and which linear backends a model runs with on a device: one pure choice at load.

fast, CPU: residual and activations fp32, packed weights for few rows through our compiled kernel
(it rounds its input to 16-bit integers) or torch's int4 kernel (to bf16), a dense copy for many.
fast, GPU: the published half type throughout; a packed bf16 model in fp16, which its kernels
multiply, around an fp32 residual stream. Each linear's input and output passes through fp16 in
either way, so nothing overflows that would not have before; only the sum of all that the layers add
needs a wider range, and it has one.
exact: fp32 and batch-invariant ops on any device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine_actor import ops
from engine_actor.model.config import ModelConfig
from engine_actor.model.kv_store import KV_DTYPES
from engine_actor.model.memory import free_bytes

AUTO_COPY_LIMIT = 1 << 30
"""Largest dense copy that nobody asked for, bytes."""
AUTO_COPY_SHARE = 4
"""It may take one part in so many of the free memory."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The choice. hidden_dtype: of the activations; residual_dtype: of the stream that layers add
    to. linears, head: how to prepare them.
    """

    device: torch.device
    hidden_dtype: torch.dtype
    residual_dtype: torch.dtype
    kv_dtype: torch.dtype
    linears: ops.LinearPolicy
    head: ops.LinearPolicy


def parameters(config: ModelConfig) -> int:
    """Weights in the linears of all layers (not embedding and head)."""
    qkv = config.hidden * config.head_dim * (config.n_heads + 2 * config.n_kv_heads)
    o = config.hidden * config.head_dim * config.n_heads
    return config.n_layers * (qkv + o + 3 * config.hidden * config.intermediate)


def compute_dtype(
    config: ModelConfig, device: torch.device, numerics: str, packed: bool = False
) -> torch.dtype:
    """dtype of activations between the linears. packed: all linears of the layers are."""
    if numerics == "exact" or device.type == "cpu":
        return torch.float32
    if packed and config.dtype == "bfloat16":
        return torch.float16
    published = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return published.get(config.dtype, torch.float32)


def resolve_kv_dtype(
    config: ModelConfig,
    device: torch.device,
    numerics: str,
    kv_dtype: str,
    packed: bool = False,
) -> torch.dtype:
    """ "auto" is the compute dtype. Raises ValueError for exact numerics below fp32, and for
    int8 where no kernel reads it.
    """
    if kv_dtype == "auto":
        return compute_dtype(config, device, numerics, packed)
    chosen = KV_DTYPES[kv_dtype]
    if numerics == "exact" and chosen != torch.float32:
        raise ValueError(f"numerics: exact needs kv.dtype fp32 or auto, got {kv_dtype}")
    if chosen == torch.int8 and device.type == "cpu":
        raise ValueError("kv.dtype int8 is read by the CUDA kernels only")
    return chosen


def choose_precision(
    config: ModelConfig,
    device: torch.device,
    numerics: str,
    kv_dtype: str,
    dense_copy: str,
    native: str = "auto",
    packed: bool = False,
) -> Precision:
    """See build_runner for the arguments."""
    dtype = compute_dtype(config, device, numerics, packed)
    kv = resolve_kv_dtype(config, device, numerics, kv_dtype, packed)
    if numerics == "exact":
        exact = ops.LinearPolicy(device, torch.float32, exact=True)
        return Precision(device, dtype, dtype, kv, exact, exact)
    plain = ops.LinearPolicy(device, dtype, native=native == "auto")
    if device.type != "cpu":
        is_narrowed = dtype == torch.float16 and config.dtype == "bfloat16"
        residual = torch.float32 if is_narrowed else dtype
        return Precision(device, dtype, residual, kv, plain, plain)
    backend, dense_dtype = ops.fastest_dense()
    dense = replace(plain, dense=backend, dense_dtype=dense_dtype)
    width = 4 if backend.name == ops.DENSE.name and dense_dtype == torch.float32 else 2
    wanted = dense_copy == "on" or (dense_copy == "auto" and _copy_is_cheap(config, width))
    head = replace(dense, meets_prompts=False)
    return Precision(device, dtype, dtype, kv, dense if wanted else plain, head)


def _copy_is_cheap(config: ModelConfig, bytes_each: int) -> bool:
    size = bytes_each * parameters(config)
    return size < min(AUTO_COPY_LIMIT, free_bytes(torch.device("cpu")) // AUTO_COPY_SHARE)
