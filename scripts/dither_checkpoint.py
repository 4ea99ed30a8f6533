#!/usr/bin/env python3
"""A copy of a checkpoint whose weights lie on no lattice, to judge quantisers on.

    scripts/dither_checkpoint.py demo /tmp/dithered

A source that is quantised itself flatters grids which meet its own. Here every weight of the layers
gets seeded uniform noise within half a step of its source's grid, which makes it as good as any
that rounds to the same code. Embedding and head stay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from configs.load import cache_dir
from engine_actor.load.checkpoint import Checkpoint, open_checkpoint
from engine_actor.load.formats.base import Weight
from engine_actor.load.source import resolve
from engine_actor.load.writer import atomic_folder, write_packed
from engine_actor.ops import DenseLinear, PackedLinear, dequantise
from engine_actor.quant.companions import source_config, write_companions
from engine_actor.quant.grid import spread


def dithered(linear: PackedLinear, draw: torch.Generator) -> DenseLinear:
    """Weight fp32 [N, K] plus noise within half a step."""
    step = spread(linear.scales.float(), linear.in_features, linear.group_size)
    noise = torch.rand(step.shape, generator=draw) - 0.5
    return DenseLinear(dequantise(linear) + noise * step, linear.bias)


def weights(source: Checkpoint, seed: int) -> Iterator[tuple[str, Weight]]:
    """Every weight in order."""
    draw = torch.Generator().manual_seed(seed)
    for name, weight in source.weights():
        if name.startswith("layers.") and isinstance(weight, PackedLinear):
            yield name, dithered(weight, draw)
        else:
            yield name, weight


def main(arguments: list[str] | None = None) -> int:
    """Write one folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    source = open_checkpoint(resolve(options.source, cache_dir()))
    with atomic_folder(options.target) as folder:
        made = {"name": options.source, "dithered with seed": options.seed}
        write_packed(folder, source_config(source), weights(source, options.seed), made)
        write_companions(source, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
