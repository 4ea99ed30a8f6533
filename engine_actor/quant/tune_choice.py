"""Whether a model can be tuned on a device, and how far: codes too, scales only, or not at all.

From the config and the free memory alone. Knows no tensor.
"""

from __future__ import annotations

from dataclasses import replace

from engine_actor.load.refusal import refusal
from engine_actor.model.config import ModelConfig
from engine_actor.quant.plan import MIB, layer_weights
from engine_actor.quant.trainable import LOGITS_AT_ONCE
from engine_actor.quant.tune import Tuning

BATCH = {"cuda": 8, "cpu": 2}
"""Rows of a step by kind of device."""
MOST_STEPS = 300
"""Where the user names no number: a 135M gains little from more."""
MOST_EPOCHS = 8
"""Likewise how often a row is seen; a model learns a short text by heart."""
SHARE = 0.9
"""Of the free memory that may be counted on; the rest is fragments."""


def default_steps(rows: int, batch: int) -> int:
    """Steps of `batch` rows over a text of so many."""
    return max(1, min(MOST_STEPS, MOST_EPOCHS * rows // batch))


def choose_tuning(
    config: ModelConfig, wanted: Tuning, free: int, *, asked: bool = True
) -> tuple[Tuning | None, str]:
    """(what fits into `free` bytes of the device, a line about it). Where nothing fits, None; or
    CheckpointError if the user has `asked` for it.
    """
    usable = int(free * SHARE)
    codes, scales = (needed_bytes(config, replace(wanted, codes=both)) for both in (True, False))
    of_it = f"{usable // MIB:,} MiB are free for it"
    if wanted.codes and codes <= usable:
        return wanted, f"  tuned as a whole in {wanted.steps} steps, codes and scales"
    if scales <= usable:
        why = f": with codes it takes {codes // MIB:,} MiB, {of_it}" if wanted.codes else ""
        line = f"  tuned as a whole in {wanted.steps} steps, scales only{why}"
        return replace(wanted, codes=False), line
    need = f"tuning takes {scales // MIB:,} MiB, {of_it}"
    if not asked:
        return None, f"  not tuned as a whole: {need}"
    raise refusal(f"--tune-steps {wanted.steps}", f"{need}; 0 converts without")


def state_bytes(config: ModelConfig, tuning: Tuning) -> int:
    """A bound on an unfinished tuning on disk: three fp32 numbers for each one that is trained."""
    weights = layer_weights(config)
    return 12 * weights if tuning.codes else weights


def needed_bytes(config: ModelConfig, tuning: Tuning) -> int:
    """A bound on what tuning holds on its device.

    Trained codes are four fp32 numbers a weight (value, gradient, Adam's two), kept codes a byte;
    scales are a few percent of that. One layer is dequantised at once, forwards and backwards: six
    fp32 copies. Activations: a hidden state per layer, and one layer's own, twice; a recorded graph
    has memory of its own for all that lives within a step, gradients among it. Two heads, and four
    sets of logits. The whole text before the first layer and behind the last.
    """
    rows, length = tuning.text.tokens.shape
    tokens = tuning.batch * length
    weights = layer_weights(config)
    layer = weights // config.n_layers
    heads = config.n_heads + 2 * config.n_kv_heads
    wide = 8 * config.hidden + 4 * heads * config.head_dim + 6 * config.intermediate
    scores = 4 * config.n_heads * length
    activations = tokens * 4 * (config.n_layers * config.hidden + 2 * (wide + scores))
    logits = 4 * 4 * min(LOGITS_AT_ONCE, tokens * config.vocab_size)
    text = 2 * 4 * rows * length * config.hidden
    tables = 2 * 4 * config.vocab_size * config.hidden
    trained = weights * (16 if tuning.codes else 2)
    return trained + 24 * layer + activations + logits + text + tables
