"""Which linear shapes a checkpoint asks for, and measuring the kernels on them.

Reads headers; loads no weight. Knows no command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine_actor import ops
from engine_actor.load.checkpoint import Checkpoint, open_checkpoint
from engine_actor.load.progress import Progress

KERNEL_BITS = (3, 4)


def can_tune() -> bool:
    """Whether torch finds a CUDA device here."""
    return ops.cuda_devices() > 0


def tune(folder: Path, progress: Progress) -> list[str]:
    """Measure every backend on the shapes of the checkpoint in `folder` and write the table; lines
    for people. Raises CheckpointError.
    """
    shapes = list(shapes_of(open_checkpoint(folder)))
    if not shapes:
        return ["no linear of this checkpoint is packed in 3 or 4 bits: nothing to tune"]
    path, rows = ops.tune_this_card(shapes, progress)
    lines = [
        f"{row.n[0]}x{row.k[0]} W{row.bits[0]}, {row.m[0]} to {row.m[1]} rows: {row.backend}"
        for row in rows
    ]
    return [*lines, f"written to {path}; used from the next start on"]


def shapes_of(checkpoint: Checkpoint) -> Iterator[ops.LinearShape]:
    """Each distinct fused linear, in every width and group that the checkpoint has."""
    model = checkpoint.config
    heads = model.n_heads * model.head_dim
    keys_values = 2 * model.n_kv_heads * model.head_dim
    sizes = (
        (heads + keys_values, model.hidden),
        (model.hidden, heads),
        (2 * model.intermediate, model.hidden),
        (model.hidden, model.intermediate),
    )
    for bits, group, _ in checkpoint.quantisation.kinds:
        if bits in KERNEL_BITS:
            for n, k in dict.fromkeys(sizes):
                yield ops.LinearShape(n, k, bits, k if group == -1 else group)
