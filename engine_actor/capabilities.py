"""What an engine would choose here and why, for people: device, dtypes, a backend for each case.

Reads a checkpoint's headers at most; loads no weight and downloads nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from configs.schema import AppArgs, EngineConfig
from engine_actor import ops
from engine_actor.errors import CheckpointError
from engine_actor.load.checkpoint import CONFIG, Checkpoint, open_checkpoint
from engine_actor.load.demo import FOLDER
from engine_actor.load.source import DEMO, on_disk, require_hub_name
from engine_actor.model.card_plan import Card, CardPlan
from engine_actor.model.precision import Precision, choose_precision
from engine_actor.planning import plan_for, plan_here
from engine_actor.planning import render as render

MIB = 1 << 20


def usable_gpus() -> int:
    """CUDA devices that torch can use in this process."""
    return ops.cuda_devices()


def describe_device(device: str) -> str:
    """One line on the device."""
    info = ops.device_info(torch.device(device))
    if info.kind == "cpu":
        threads = torch.get_num_threads()
        return f"CPU with {info.capability}, {threads} threads, torch {torch.__version__}"
    name = f"{info.name}, sm_{info.sm}, {info.multiprocessors} multiprocessors"
    return f"{name}, torch {torch.__version__}"


def checkpoint_on_disk(path: str, cache_dir: Path) -> Checkpoint | None:
    """The checkpoint that `path` means, None where it has yet to be fetched. Raises CheckpointError
    where the folder is here and is none, or nothing can be fetched by that name.
    """
    if path == DEMO:
        demo = cache_dir / FOLDER
        return open_checkpoint(demo) if (demo / CONFIG).is_file() else None
    found = on_disk(path)
    if found is None:
        require_hub_name(path)
        return None
    return open_checkpoint(found)


def memory_plan(args: AppArgs, folder: Path, card_mb: int | None, sm: int) -> CardPlan:
    """The plan for this machine's GPU, or for a card of so many MiB and compute capability sm / 10.
    Raises CheckpointError.
    """
    try:
        if card_mb is None:
            return plan_here(args, open_checkpoint(folder), torch.device("cuda"))
        return plan_for(args, open_checkpoint(folder), Card(card_mb * MIB), sm)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def describe_choices(engine: EngineConfig, device: str, checkpoint: Checkpoint) -> list[str]:
    """Dtypes, and which linear backend runs for which rows; refusals with their reasons. Raises
    ValueError for settings that contradict each other.
    """
    precision = choose_precision(
        checkpoint.config,
        torch.device(device),
        engine.numerics,
        engine.kv.dtype,
        engine.dense_prefill_copy,
        engine.native_kernels,
        checkpoint.packed,
    )
    bits, group, _ = checkpoint.quantisation.kinds[0]
    return [
        f"weights: {checkpoint.quantisation}, {checkpoint.nbytes / MIB:.0f} MiB",
        f"numerics {engine.numerics}: activations {_name(precision.hidden_dtype)}, "
        f"KV {_name(precision.kv_dtype)}",
        *_linear_lines(checkpoint, precision, bits, group),
    ]


def _linear_lines(checkpoint: Checkpoint, precision: Precision, bits: int, group: int) -> list[str]:
    """The largest linear of a layer stands for all: they differ in size only."""
    config, policy = checkpoint.config, precision.linears
    n, k = 2 * config.intermediate, config.hidden
    weights = _shape_only(n, k, bits, group)
    if policy.exact:
        heading = "linears, any number of rows: exact.tiles"
    elif bits and policy.dense is not None:
        heading = f"linears, more than {policy.few_rows} rows: {policy.dense.name}; fewer: first of"
    else:
        heading = "linears: first of"
    return (
        [f"{heading} (N {n}, K {k}, {bits or 'no'} bits)"]
        + [
            f"  {verdict.backend}: {verdict.refusal or 'fits'}"
            for verdict in ops.explain_linear(weights, policy)
            if policy.exact or verdict.backend != "exact.tiles"
        ]
        + [
            f"    {choice.first} to {choice.last} rows: {choice.backend} ({choice.why})"
            for choice in ops.explain_rows(weights, policy)
        ]
    )


def _shape_only(n: int, k: int, bits: int, group: int) -> ops.PackedLinear | ops.DenseLinear:
    """A linear without memory, to ask the backends about."""
    if not bits:
        return ops.DenseLinear(torch.empty(n, k, device="meta"), None)
    groups = -(-k // (group if group > 0 else k))
    codes = torch.empty(n, -(-k * bits // 8), dtype=torch.uint8, device="meta")
    scales = torch.empty(n, groups, dtype=torch.float16, device="meta")
    return ops.PackedLinear(bits, group, k, codes, scales)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
