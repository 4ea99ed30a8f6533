"""What `deepinfer-sm86 quantize` and `eval` do, with plain values in and lines of text out.

Raises CheckpointError, one line, for everything a user can get wrong. Knows no argument parser.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine_actor import ops
from engine_actor.load.checkpoint import Checkpoint, open_checkpoint
from engine_actor.load.names import LinearSlot, slots
from engine_actor.load.refusal import refusal
from engine_actor.load.source import resolve
from engine_actor.model.config import ModelConfig
from engine_actor.model.memory import free_bytes
from engine_actor.quant.auto import auto_recipe, layer_budget, sensitivities
from engine_actor.quant.convert import Job, convert
from engine_actor.quant.evaluate import run_checkpoint, score
from engine_actor.quant.journal import SUFFIX
from engine_actor.quant.plan import FOUR_BITS, Plan, make_plan, read_size, require_fit
from engine_actor.quant.progress import TimedProgress
from engine_actor.quant.recipe import EMBEDDING, GROUP, Recipe, fixed_recipe
from engine_actor.quant.report import score_lines
from engine_actor.quant.texts import (
    CALIBRATION,
    CALIBRATION_ROWS,
    EVALUATION,
    EVALUATION_ROWS,
    LENGTH,
    TUNING_ROWS,
    TokenRows,
    token_rows,
)
from engine_actor.quant.tune import Tuning
from engine_actor.quant.tune_choice import BATCH, choose_tuning, default_steps, state_bytes
from engine_actor.work.memory_errors import is_out_of_memory

Say = Callable[[str], None]
TABLES = {8: EMBEDDING, 4: FOUR_BITS}
NO_MEMORY = (
    "out of memory; finished layers are kept: free some and go on with --resume, or delete them "
    "and begin again with --device cpu or --tune-steps 0"
)


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """The flags of `quantize` as they came. group None: the recipe's own; embedding_bits None: 8,
    and 4 where only so the recipe fits; tune_steps None: see default_steps.
    """

    source: str
    target: Path
    recipe: str
    group: int | None = None
    offsets: bool = False
    embedding_bits: int | None = None
    head_bits: int = 8
    fit: str | None = None
    calibration: Path | None = None
    text: Path | None = None
    tune_steps: int | None = None
    resume: bool = False
    device: str = "auto"
    threads: int | None = None


def quantize(options: QuantizeOptions, cache_dir: Path, say: Say) -> None:
    """Plan, convert, report. Prints the plan before the first layer."""
    budget = None if options.fit is None else read_size(options.fit)
    device = prepare(options.device, options.threads)
    _require_free(options.target)
    checkpoint = open_checkpoint(resolve(options.source, cache_dir))
    calibration_rows = CALIBRATION_ROWS[device.type]
    calibration = _rows(checkpoint, options.calibration, CALIBRATION, calibration_rows)
    evaluation = _rows(checkpoint, options.text, EVALUATION, EVALUATION_ROWS)
    progress = TimedProgress("quantize")
    with _one_line_without_memory(device, NO_MEMORY):
        recipe = _recipe(options, checkpoint, calibration, budget, device, progress)
    plan = make_plan(checkpoint.config, recipe)
    say(f"{options.source} -> {options.target}")
    for line in plan.lines(budget):
        say(line)
    require_fit(checkpoint.config, plan, budget)
    tuning, note = _tuning(options, checkpoint, device)
    _require_layout(checkpoint.config, recipe)
    texts = calibration.tokens.numel() + evaluation.tokens.numel()
    tuning, saving = _with_room(options.target, checkpoint.config, plan, tuning, texts)
    for line in filter(None, (note, saving)):
        say(line)
    job = Job(checkpoint, options.source, recipe, calibration, evaluation, device, tuning=tuning)
    with _one_line_without_memory(device, NO_MEMORY):
        report = convert(job, options.target, progress, options.resume)
    say(f"{options.target} is ready:")
    for line in report.lines():
        say(line)


@contextmanager
def _one_line_without_memory(device: torch.device, advice: str) -> Iterator[None]:
    """Raises CheckpointError with the advice where the work inside runs out of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise refusal(f"--device {device.type}", advice) from None


def _recipe(
    options: QuantizeOptions,
    checkpoint: Checkpoint,
    calibration: TokenRows,
    budget: int | None,
    device: torch.device,
    progress: TimedProgress,
) -> Recipe:
    if options.recipe != "auto":
        recipe = fixed_recipe(options.recipe, options.group or GROUP, options.offsets)
        return _with_tables(recipe, options, checkpoint, budget)
    if options.group is not None or options.offsets:
        raise refusal("--recipe auto", "chooses groups itself: give neither --group nor --offsets")
    # What 8 bits would give the embedding buys more in the layers, as long as those are this small.
    like = _with_tables(fixed_recipe("mixed", GROUP), options, checkpoint, budget)
    bytes_left = layer_budget(checkpoint, like, budget)
    if budget is not None:  # refuse what cannot fit before minutes of measuring
        least = replace(like, grids=fixed_recipe("w3", 128).grids)
        require_fit(checkpoint.config, make_plan(checkpoint.config, least), budget)
    found = sensitivities(checkpoint, calibration, options.target, device, progress)
    return auto_recipe(found, bytes_left, like)


def _with_tables(
    recipe: Recipe, options: QuantizeOptions, checkpoint: Checkpoint, budget: int | None
) -> Recipe:
    """With the embedding and the head that were asked for. A budget that 8 bits exceed gives an
    embedding of its own 4; the head, and an embedding that is the head, lose too much by it.
    """
    recipe = replace(
        recipe, embedding=TABLES[options.embedding_bits or 8], head=TABLES[options.head_bits]
    )
    config = checkpoint.config
    if options.embedding_bits is not None or budget is None or config.tie_embeddings:
        return recipe
    if make_plan(config, recipe).total <= budget:
        return recipe
    return replace(recipe, embedding=FOUR_BITS)


def _tuning(
    options: QuantizeOptions, checkpoint: Checkpoint, device: torch.device
) -> tuple[Tuning | None, str]:
    """(how to tune, a line about it)."""
    if options.tune_steps == 0 or (options.tune_steps is None and device.type == "cpu"):
        return None, ""
    text = _rows(checkpoint, options.calibration, CALIBRATION, TUNING_ROWS)
    asked, batch = options.tune_steps is not None, BATCH[device.type]
    steps = options.tune_steps or default_steps(text.tokens.shape[0], batch)
    wanted = Tuning(text, steps, batch=batch)
    return choose_tuning(checkpoint.config, wanted, free_bytes(device), asked=asked)


def evaluate(
    model: str,
    source: str | None,
    text: Path | None,
    device: str,
    threads: int | None,
    cache_dir: Path,
) -> tuple[list[str], dict[str, Any]]:
    """(lines for a reader, the same for a program) of `eval`."""
    where = prepare(device, threads)
    checkpoint = open_checkpoint(resolve(model, cache_dir))
    tokens = _rows(checkpoint, text, EVALUATION, EVALUATION_ROWS)
    used = checkpoint.usable_vocab_size()
    progress = TimedProgress("eval")
    reference = source_score = None
    with _one_line_without_memory(where, "out of memory; free some or take another --device"):
        if source is not None:
            other = open_checkpoint(resolve(source, cache_dir))
            _require_alike(checkpoint, other, tokens, text)
            reference = run_checkpoint(other, tokens.tokens, where, progress)
            source_score = score(reference, None, tokens.tokens, used, where)
        finished = run_checkpoint(checkpoint, tokens.tokens, where, progress)
        ours = score(finished, reference, tokens.tokens, used, where)
    document = {
        "model": model,
        "source": source,
        "text": tokens.described(),
        "perplexity": ours.perplexity,
        "source_perplexity": None if source_score is None else source_score.perplexity,
        "kl": ours.kl,
        "top1": ours.top1,
        "positions": ours.positions,
        "weights": str(checkpoint.quantisation),
        "bytes": checkpoint.nbytes,
    }
    lines = [f"{model} ({checkpoint.quantisation}) on {tokens.name}:"]
    return [*lines, *score_lines(ours, source_score)], document


def _require_alike(
    model: Checkpoint, source: Checkpoint, tokens: TokenRows, text: Path | None
) -> None:
    """KL needs the same tokens to mean the same in both."""
    theirs = _rows(source, text, EVALUATION, EVALUATION_ROWS)
    if source.config.vocab_size != model.config.vocab_size or theirs.digest != tokens.digest:
        raise refusal("--source", "has another tokenizer or vocabulary; KL would mean nothing")


def prepare(device: str, threads: int | None) -> torch.device:
    """The device to work on; `auto` is CUDA where torch finds it. Raises CheckpointError."""
    if threads is not None:
        torch.set_num_threads(threads)
    has_gpu = ops.cuda_devices() > 0
    if device == "cuda" and not has_gpu:
        raise refusal("--device cuda", "torch finds no CUDA device here")
    return torch.device("cuda" if device != "cpu" and has_gpu else "cpu")


def _rows(checkpoint: Checkpoint, path: Path | None, builtin: str, rows: int) -> TokenRows:
    length = min(LENGTH, checkpoint.config.max_model_len)
    return token_rows(path, builtin, checkpoint.folder, rows, length)


def _require_free(target: Path) -> None:
    if os.path.lexists(target):  # a link that leads nowhere would be in the way at the end
        raise refusal(str(target), "is there already; nothing is overwritten")


def _require_layout(config: ModelConfig, recipe: Recipe) -> None:
    """Groups that no kernel of a GPU takes are refused here, not when the folder is served."""
    for slot in slots(config):
        if not isinstance(slot, LinearSlot) or slot.name in ("embed", "head"):
            continue
        _, index, short = slot.name.split(".")
        grid = recipe.grid(int(index), short)
        why = ops.refuse_strips(grid.bits, grid.group, slot.in_features)
        if why is not None:
            raise refusal(f"--group {grid.group}", f"no GPU kernel for {slot.name}: {why}")


def _with_room(
    target: Path, config: ModelConfig, plan: Plan, tuning: Tuning | None, tokens: int
) -> tuple[Tuning | None, str]:
    """(how to tune, a line about it) by the room on the disk. Layers are kept beside the target
    until it is whole, and so are tuned ones; the hidden states of the texts and the state of a
    tuning are there twice while they are replaced. A tuning whose state has no room is not saved on
    its way. Raises CheckpointError where the rest has none.
    """
    free, parent = _room(target)
    least = 2 * tokens * 4 * config.hidden + (2 if tuning is None else 3) * plan.weights
    if free < least:
        need = math.ceil(least / 2**20)
        raise refusal(str(parent), f"{need} MiB of disk are needed, {free >> 20} MiB are free")
    if tuning is None or free >= least + 2 * state_bytes(config, tuning):
        return tuning, ""
    need = math.ceil(2 * state_bytes(config, tuning) / 2**20)
    line = f"  tuning is not saved on its way: it would take {need:,} MiB of disk"
    return replace(tuning, saved=False), line


def _room(target: Path) -> tuple[int, Path]:
    """(bytes, of which folder). What an earlier run has left there counts: it is gone on with or
    replaced.
    """
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    kept = target.with_name(target.name + SUFFIX)
    left = kept.iterdir() if kept.is_dir() else ()
    return shutil.disk_usage(parent).free + sum(path.stat().st_size for path in left), parent
