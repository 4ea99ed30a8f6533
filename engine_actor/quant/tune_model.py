"""From a rounded model and its source to tuning and back: who is read when, what it comes to.

Knows checkpoints and rounded layers; how tuning works is tune.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_actor.load.checkpoint import Checkpoint
from engine_actor.load.formats.base import Weight
from engine_actor.load.progress import Progress
from engine_actor.ops import PackedLinear, dequantise
from engine_actor.quant.evaluate import embed, run_checkpoint
from engine_actor.quant.stored_layer import stored_tensors
from engine_actor.quant.stream import Dense, LayerReader, LayerWeights, as_matrix
from engine_actor.quant.trainable import TrainableLayer, TrainableModel
from engine_actor.quant.tune import Target, Tuned, Tuning, tune

PackedLayer = tuple[Mapping[str, PackedLinear], Mapping[str, torch.Tensor]]
"""Linears and norms by short names."""


@dataclass(frozen=True, slots=True, eq=False)
class Rounding:
    """What stays as it is while layers are tuned: the source, our embedding and our head."""

    source: Checkpoint
    reader: LayerReader
    device: torch.device
    table: PackedLinear
    head: PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class TunedLayers:
    """layers: as stored_tensors makes them; norm: the last one; both as they were where tuning did
    not help.
    """

    layers: list[dict[str, torch.Tensor]]
    norm: torch.Tensor
    tuning: Tuning
    tuned: Tuned

    def described(self) -> dict[str, Any]:
        """For the report."""
        return {
            **self.tuning.described(),
            "held_out_kl_before": self.tuned.before,
            "held_out_kl": self.tuned.after,
            "kept": self.tuned.kept,
        }


def tune_rounded(
    rounding: Rounding,
    layers: Sequence[PackedLayer],
    tuning: Tuning,
    folder: Path,
    progress: Progress,
) -> TunedLayers:
    """Tune and pack again. folder: of the unfinished conversion."""
    tokens, device = tuning.text.tokens, rounding.device
    norm = rounding.reader.top("norm")
    assert isinstance(norm, torch.Tensor)
    target = _target(rounding, tokens, progress)
    trained = []
    for index, (packed, norms) in enumerate(layers):
        source = rounding.reader.layer(index).linears if tuning.codes else {}
        weights = {name: one.weight for name, one in source.items()}
        trained.append(TrainableLayer(rounding.source.config, packed, weights, norms, device))
    model = TrainableModel(rounding.source.config, trained, norm, tokens.shape[1], device)
    tuned = tune(model, target, tuning, folder, progress)
    if not tuned.kept:
        kept = [stored_tensors(packed, norms) for packed, norms in layers]
        return TunedLayers(kept, norm, tuning, tuned)
    found = [
        stored_tensors(
            {short: one.packed() for short, one in layer.linears.items()},
            {name: one.stored() for name, one in layer.norms.items()},
        )
        for layer in trained
    ]
    return TunedLayers(found, model.norm.stored(), tuning, tuned)


def _target(rounding: Rounding, tokens: torch.Tensor, progress: Progress) -> Target:
    used, device = rounding.source.usable_vocab_size(), rounding.device

    def dense(head: Weight) -> torch.Tensor:
        return as_matrix(head)[:used].to(device)

    finished = run_checkpoint(rounding.source, tokens, device, progress)
    embedded = embed(rounding.table, tokens)
    # A clone: what inference mode made cannot take part in a backward pass.
    wanted = finished.hidden.clone()
    return Target(embedded, wanted, dense(rounding.head), dense(finished.head))


def dense_layer(
    packed: Mapping[str, PackedLinear], norms: Mapping[str, torch.Tensor], device: torch.device
) -> LayerWeights:
    """A rounded layer as numbers, on the device."""
    linears = {}
    for short, one in packed.items():
        bias = None if one.bias is None else one.bias.to(device)
        linears[short] = Dense(dequantise(one).to(device), bias)
    return LayerWeights(linears, {name: norm.to(device) for name, norm in norms.items()})
