"""From a rounded model and its source to tuning and back: who is read when, what it comes to.

Knows checkpoints and rounded layers; how tuning works is tune.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_actor.load.checkpoint import Checkpoint
from engine_actor.load.progress import Progress
from engine_actor.model.graph_capture import CudaCapture
from engine_actor.model.memory import TorchAllocator
from engine_actor.ops import PackedLinear, dequantise, moved
from engine_actor.quant.evaluate import embed
from engine_actor.quant.forward import linear
from engine_actor.quant.plain_decoder import Places, RowsFn, decoder_layer, norm
from engine_actor.quant.slopes import Capture
from engine_actor.quant.stored_layer import stored_tensors
from engine_actor.quant.stream import Dense, LayerReader, LayerWeights, as_matrix, on_device
from engine_actor.quant.trainable import TrainableLayer, TrainableModel
from engine_actor.quant.tune import Target, Tuned, Tuning, tensor_cores, tune

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
    last = rounding.reader.top("norm")
    assert isinstance(last, torch.Tensor)
    with tensor_cores():
        target = _target(rounding, tuning, progress)
    trained = []
    for index, (packed, norms) in enumerate(layers):
        source = rounding.reader.layer(index).linears if tuning.codes else {}
        weights = {name: one.weight for name, one in source.items()}
        trained.append(TrainableLayer(rounding.source.config, packed, weights, norms, device))
    model = TrainableModel(rounding.source.config, trained, last, tokens.shape[1], device)
    tuned = tune(model, target, tuning, folder, progress, _capture(device))
    if not tuned.kept:
        kept = [stored_tensors(packed, norms) for packed, norms in layers]
        return TunedLayers(kept, last, tuning, tuned)
    found = [
        stored_tensors(
            {short: one.packed() for short, one in layer.linears.items()},
            {name: one.stored() for name, one in layer.norms.items()},
        )
        for layer in trained
    ]
    return TunedLayers(found, model.norm.stored(), tuning, tuned)


def _capture(device: torch.device) -> Capture | None:
    """Into a graph, where there is a GPU; what earlier work keeps for later is given back first."""
    if device.type != "cuda":
        return None
    capture = CudaCapture(device)

    def emptied(run: Callable[[], None]) -> Callable[[], None]:
        TorchAllocator(device).empty_cache()
        return capture(run)

    return emptied


def _target(rounding: Rounding, tuning: Tuning, progress: Progress) -> Target:
    """The source's answers on the text, by plain fp32 a layer at a time."""
    config, device, reader = rounding.source.config, rounding.device, rounding.reader
    tokens, used = tuning.text.tokens, rounding.source.usable_vocab_size()
    table = reader.top("embed")
    hidden = embed(table, tokens).to(device)
    places = Places.of(config, tokens.shape[1], device)
    parts = [slice(i, i + tuning.batch) for i in range(0, len(hidden), tuning.batch)]
    for index in range(config.n_layers):
        progress("source", index, config.n_layers)
        weights = reader.layer(index)
        linears = {name: linear(one) for name, one in weights.linears.items()}
        norms = {name: _norm(weight, config.rms_eps) for name, weight in weights.norms.items()}
        for part in parts:
            hidden[part] = decoder_layer(config, linears, norms, hidden[part], places)
    progress("source", config.n_layers, config.n_layers)
    last = reader.top("norm")
    assert isinstance(last, torch.Tensor)
    wanted = norm(hidden, last.float().to(device), config.rms_eps)
    head = table if config.tie_embeddings else reader.top("head")
    ours, theirs = (as_matrix(on_device(one, device))[:used] for one in (rounding.head, head))
    return Target(embed(rounding.table, tokens).to(device), wanted, ours, theirs)


def _norm(weight: torch.Tensor, eps: float) -> RowsFn:
    wide = weight.float()
    return lambda x: norm(x, wide, eps)


def dense_layer(
    packed: Mapping[str, PackedLinear], norms: Mapping[str, torch.Tensor], device: torch.device
) -> LayerWeights:
    """A rounded layer as numbers, on the device."""
    linears = {}
    for short, one in packed.items():
        there = moved(one, device)
        linears[short] = Dense(dequantise(there), there.bias)
    return LayerWeights(linears, {name: norm.to(device) for name, norm in norms.items()})
