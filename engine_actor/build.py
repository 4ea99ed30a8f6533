"""From configuration to a running engine: checkpoint, device, memory plan, runner, warm-up, thread.

The one place that knows both the loader and the engine. Called once per process, before anything
is served; every refusal is a CheckpointError of one line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from configs import load
from configs.schema import AppArgs, EngineConfig, ModelSource
from engine_actor import ops
from engine_actor.core.budget import blocks_for_bytes
from engine_actor.engine import Engine
from engine_actor.errors import CheckpointError
from engine_actor.facts import EngineFacts
from engine_actor.load.checkpoint import Checkpoint, context_length, open_checkpoint
from engine_actor.load.progress import Progress, silent
from engine_actor.load.source import resolve
from engine_actor.model.card_plan import CardPlan
from engine_actor.model.config import ModelConfig
from engine_actor.model.host_blocks import host_budget, host_slots, require_host_memory
from engine_actor.model.kv_store import kv_bytes_per_block
from engine_actor.model.ledger import MIB
from engine_actor.model.memory import (
    card_ledger,
    card_of,
    free_bytes,
    keep_in_one_piece,
    plan_memory,
)
from engine_actor.model.runner import ModelRunner, build_runner
from engine_actor.model.sampler import BrokenLogits, Sampler
from engine_actor.planning import (
    plan_here,
    prefill_graph_rows,
    render,
    wants_small_workspaces,
    with_chunk,
)
from engine_actor.service import EngineService
from engine_actor.threads import engine_threads, physical_cores
from engine_actor.warm_up import warm_up

LOGGER = logging.getLogger(__name__)
FIRST_KV_BYTES = 32 * MIB
"""KV memory taken at the start; it grows with use."""
HEAD_ROWS = 256


def build_service(
    app_args: Mapping[str, Any] | AppArgs,
    name: str = "engine-0",
    on_fatal: Callable[[BaseException], None] = lambda error: None,
    progress: Progress = silent,
) -> EngineService:
    """Load, warm up, start the thread. Returns when requests can be served.

    Raises CheckpointError; pydantic's ValidationError for bad arguments.
    """
    args = AppArgs.model_validate(app_args)
    source = args.model
    folder = resolve(source.path, load.cache_dir(), source.revision, progress)
    return EngineService(build_engine(args, folder, name), on_fatal)


def build_engine(args: AppArgs, folder: Path, name: str = "engine-0") -> Engine:
    """An engine without a thread around the checkpoint in `folder`. Raises CheckpointError."""
    return engine_around(args, open_checkpoint(folder), name)


def engine_around(args: AppArgs, checkpoint: Checkpoint, name: str = "engine-0") -> Engine:
    """An engine without a thread around an opened checkpoint. Raises CheckpointError, before any
    weight is read where the card cannot hold what is planned.
    """
    config = args.engine
    device = choose_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.cpu_threads or engine_threads(physical_cores()))
    max_model_len = context_length(args.model, checkpoint)
    require_host_memory(config)
    plan = None if device.type == "cpu" else plan_device(args, checkpoint, device)
    if plan is not None:
        max_model_len = plan.settings.max_model_len
        config = with_chunk(config, plan.settings.chunk_tokens)
    runner = _load_runner(checkpoint, config, device)
    runner.prepare_decode(config.max_num_seqs, max_model_len, config.cuda_graphs)
    graph_rows = 0 if plan is None else prefill_graph_rows(config, plan.allowance)
    if graph_rows:
        runner.prepare_prefill(graph_rows, max_model_len)
    facts = _facts(args, checkpoint, runner, max_model_len, name, plan)
    sampler = Sampler(runner.vocab_size)
    engine = Engine(config, facts, runner, sampler)
    try:
        warm_up(runner, config, sampler)
    except BrokenLogits:
        why = "a weight, or a number in config.json, is out of all range"
        raise CheckpointError(f"the model gives no finite logits: {why}") from None
    LOGGER.info("%s serves %s (%s) on %s", name, facts.model, facts.weights, facts.device)
    LOGGER.info("layers: %s", facts.layer_kernels)
    return engine


def plan_device(args: AppArgs, checkpoint: Checkpoint, device: torch.device) -> CardPlan:
    """The plan of a GPU, which is held to it from here on. Raises CheckpointError where it does not
    fit, naming what would.
    """
    keep_in_one_piece()
    try:
        plan = plan_here(args, checkpoint, device)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    LOGGER.info("memory plan:\n%s", render(plan))
    if plan.refusal is not None:
        instead = f"; would fit: {'; or '.join(plan.instead)}" if plan.instead else ""
        raise CheckpointError(f"the model does not fit on the card: {plan.refusal}{instead}")
    if wants_small_workspaces(plan.allowance):
        load.choose_small_workspaces()
    card_ledger(device).hold(plan.allowance)
    return plan


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU where torch can use one. Raises CheckpointError where cuda is asked for
    and not there."""
    has_gpu = ops.cuda_devices() > 0
    if wanted == "cuda" and not has_gpu:
        raise CheckpointError("engine.device: cuda is asked for, torch finds no CUDA device here")
    return torch.device("cuda" if wanted != "cpu" and has_gpu else "cpu")


def served_name(source: ModelSource) -> str:
    """The name in /v1/models: as configured, else a Hub id or `demo` as it is, a folder's or
    file's last part."""
    if source.served_name:
        return source.served_name
    folder = Path(source.path).expanduser()
    if folder.is_file():
        return folder.stem
    return folder.resolve().name if folder.is_dir() else source.path


def activation_bytes(model: ModelConfig, config: EngineConfig, vocab_size: int) -> int:
    """Peak of one step beside weights and KV: the widest layer of a full chunk, and the head's
    fp32 logits with the sampler's copies."""
    rows = max(config.chunk_tokens, config.max_num_seqs)
    width = 4 * model.hidden + 3 * model.intermediate + 2 * model.n_heads * model.head_dim
    logits = max(HEAD_ROWS, config.max_num_seqs) * vocab_size * 4 * 3
    return rows * width * 4 + logits


def _load_runner(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> ModelRunner:
    try:
        return build_runner(
            checkpoint.config,
            checkpoint.weights(),
            device=device,
            numerics=config.numerics,
            kv_dtype=config.kv.dtype,
            block_tokens=config.kv.block_tokens,
            dense_prefill_copy=config.dense_prefill_copy,
            native_kernels=config.native_kernels,
            used_vocab=checkpoint.usable_vocab_size(),
            packed=checkpoint.packed,
        )
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _facts(
    args: AppArgs,
    checkpoint: Checkpoint,
    runner: ModelRunner,
    max_model_len: int,
    name: str,
    plan: CardPlan | None,
) -> EngineFacts:
    config, model = args.engine, checkpoint.config
    block_bytes = kv_bytes_per_block(model, runner.kv.dtype, config.kv.block_tokens)
    if plan is None:
        blocks = kv_blocks(args, model, runner, block_bytes, max_model_len)
    else:
        blocks = _blocks_left(plan, runner)
        max_model_len = context_in(blocks, config.kv.block_tokens, max_model_len)
    return EngineFacts(
        name=name,
        model=served_name(args.model),
        vocab_size=runner.vocab_size,
        max_model_len=max_model_len,
        kv_blocks=blocks,
        kv_first_blocks=max(1, min(blocks, FIRST_KV_BYTES // block_bytes)),
        kv_block_bytes=block_bytes,
        kv_host_blocks=host_slots(config, block_bytes),
        kv_dtype=str(runner.kv.dtype).removeprefix("torch."),
        weight_bytes=checkpoint.nbytes,
        device=str(runner.device),
        family=model.family,
        weights=str(checkpoint.quantisation),
        numerics=config.numerics,
        fingerprint=checkpoint.fingerprint,
        eos_token_ids=tuple(sorted(checkpoint.eos_token_ids)),
        layer_kernels=runner.layer_kernels,
        kv_moves=runner.kv.why_not_fixed,
        memory_plan={} if plan is None else plan.as_dict(),
    )


def _blocks_left(plan: CardPlan, runner: ModelRunner) -> int:
    """The planned blocks; fewer where loading took more than was planned."""
    device = runner.device
    card_of(device)
    left = card_ledger(device).free() - plan.later
    if plan.kv_bytes <= left:
        return plan.kv_blocks
    blocks = max(1, plan.kv_blocks * max(0, left) // plan.kv_bytes)
    LOGGER.warning(
        "loading took %d MiB more than planned: %d KV blocks instead of %d",
        (plan.kv_bytes - left) // MIB,
        blocks,
        plan.kv_blocks,
    )
    return blocks


def context_in(blocks: int, block_tokens: int, planned: int) -> int:
    """Tokens of the longest sequence that may be promised: as planned, at most what the pool holds,
    so that nobody is told of a context that no request can have."""
    holds = blocks * block_tokens
    if holds < planned:
        LOGGER.warning("the context is cut from %d to %d tokens, the KV pool's", planned, holds)
    return min(planned, holds)


def kv_blocks(
    args: AppArgs, model: ModelConfig, runner: ModelRunner, block_bytes: int, max_model_len: int
) -> int:
    """Most KV blocks: the budget's, at most what every sequence could fill. Raises CheckpointError
    where not even one block fits."""
    config = args.engine
    budget = None if config.kv.budget_mb == "auto" else config.kv.budget_mb * MIB
    plan = plan_memory(
        runner.device,
        reserve=config.reserve_memory_mb * MIB + host_budget(config),
        activations=activation_bytes(model, config, runner.vocab_size),
        budget=budget,
    )
    LOGGER.info("memory: %s", plan)
    useful = config.max_num_seqs * -(-max_model_len // config.kv.block_tokens)
    try:
        return min(useful, blocks_for_bytes(plan.kv, block_bytes))
    except ValueError as error:
        free = free_bytes(runner.device) // MIB
        raise CheckpointError(f"no memory for the KV pool: {error} ({free} MiB free)") from None
