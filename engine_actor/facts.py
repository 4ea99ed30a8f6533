"""What is true of one loaded model and its memory: plain values for clients and status()."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from configs.schema import EngineConfig
from engine_actor.core.kv_manager import KVManager
from engine_actor.core.limits import SchedulerLimits
from engine_actor.core.plan import OverlapMode


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Bytes, tokens and names of one engine. `kv_blocks` is the most the KV budget allows,
    `kv_first_blocks` how many exist at the start; the tensors grow from there on demand.
    `kv_host_blocks`: evicted blocks that the host keeps.
    """

    name: str
    model: str
    vocab_size: int
    max_model_len: int
    kv_blocks: int
    kv_first_blocks: int = 64
    kv_block_bytes: int = 0
    kv_host_blocks: int = 0
    kv_dtype: str = "fp32"
    weight_bytes: int = 0
    device: str = "cpu"
    family: str = ""
    weights: str = ""
    numerics: str = "fast"
    fingerprint: str = ""
    eos_token_ids: tuple[int, ...] = ()
    layer_kernels: str = ""
    kv_moves: str | None = None
    """Why the KV cache may move as it grows; None where it stays at its addresses."""
    memory_plan: Mapping[str, Any] = field(default_factory=dict)
    """What was planned before loading, in bytes; empty on a CPU."""


def pipeline_depth(config: EngineConfig, device_type: str) -> int:
    """Steps planned ahead on this kind of device: a CPU has done a step when it is launched."""
    return config.pipeline_depth if config.async_steps and device_type == "cuda" else 0


def new_kv(config: EngineConfig, facts: EngineFacts) -> KVManager:
    """An empty pool of the blocks that the memory plan allows."""
    kv = config.kv
    return KVManager(facts.kv_blocks, kv.block_tokens, kv.prefix_cache, facts.kv_host_blocks)


def scheduler_limits(
    config: EngineConfig, facts: EngineFacts, depth: int, n_layers: int
) -> SchedulerLimits:
    """The scheduler's part of the configuration."""
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_queue=config.max_queue,
        max_partial_prefills=config.max_partial_prefills,
        prefill_chunk_tokens=config.chunk_tokens,
        prefill_chunk_tokens_while_decoding=config.prefill_chunk_tokens_while_decoding,
        priority_ageing_s=config.priority_ageing_s,
        max_model_len=facts.max_model_len,
        pipeline_depth=depth,
        eos_token_ids=frozenset(facts.eos_token_ids),
        prefill_slice_tokens=config.prefill_slice_tokens,
        prefill_burst_tokens=config.prefill_burst_tokens,
        n_layers=n_layers,
    )


def wanted_mode(config: EngineConfig) -> OverlapMode:
    """How decode and prefill are to share the device; the switch wins over the mode."""
    if not config.enable_prefill_decode_overlap:
        return OverlapMode.SERIAL
    return OverlapMode(config.overlap_mode)
