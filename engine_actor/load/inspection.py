"""What a checkpoint is, for people: format, bits and bytes of every layer, from headers alone.

Knows no device. A checkpoint that would be refused raises the refusal here as it does at a start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_actor.load.checkpoint import Checkpoint, open_checkpoint
from engine_actor.load.formats.base import Entry
from engine_actor.load.names import LinearSlot, slots
from engine_actor.load.self_check import SelfCheck
from engine_actor.model.config import ModelConfig

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Layer:
    """One weight as it is loaded. bits and group are 0 where it is dense; nbytes are the file's."""

    name: str
    bits: int
    group: int
    weights: int
    nbytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint that would load."""

    format: str
    family: str
    summary: str
    n_layers: int
    max_model_len: int
    weights: int
    nbytes: int
    layers: tuple[Layer, ...]


def inspect_checkpoint(path: Path) -> Inspection:
    """Read headers. Raises CheckpointError, one line, where the checkpoint would be refused."""
    return _inspection(open_checkpoint(path))


def check_weights(path: Path) -> list[str]:
    """Read every weight once; the self-check's warnings. Raises CheckpointError."""
    opened = open_checkpoint(path)
    check = SelfCheck(opened.config)
    with opened.source.reading() as read:
        for entry in opened.entries:
            loaded = entry.load(read)
            for name, weight in (
                loaded.items() if isinstance(loaded, dict) else [(entry.name, loaded)]
            ):
                check.take(name, weight)
    return check.warnings()


def _inspection(opened: Checkpoint) -> Inspection:
    sizes = _sizes(opened.config)
    layers = tuple(_layer(entry, sizes) for entry in opened.entries)
    return Inspection(
        format=opened.quantisation.format,
        family=opened.config.family,
        summary=str(opened.quantisation),
        n_layers=opened.config.n_layers,
        max_model_len=opened.max_model_len,
        weights=sum(layer.weights for layer in layers),
        nbytes=opened.nbytes,
        layers=layers,
    )


def _sizes(config: ModelConfig) -> dict[str, int]:
    """Weights of each linear, whole and by part, and of each norm."""
    sizes: dict[str, int] = {}
    for slot in slots(config):
        if isinstance(slot, LinearSlot):
            sizes |= {part.name: part.rows * slot.in_features for part in slot.parts}
            sizes[slot.name] = slot.rows * slot.in_features
        else:
            sizes[slot.name] = slot.size
    return sizes


def _layer(entry: Entry, sizes: dict[str, int]) -> Layer:
    return Layer(entry.name, entry.bits, entry.group, sizes[entry.name], entry.nbytes, entry.note)


def render(found: Inspection, with_layers: bool) -> str:
    """Lines for a console; with_layers: one for each linear, else one for each kind."""
    head = [
        f"{found.family}, {found.n_layers} layers, {found.max_model_len} tokens of context",
        f"format {found.format}",
        f"{found.weights / 1e6:.1f} M weights in {found.nbytes / MIB:.1f} MiB: "
        f"{_per_weight(found.nbytes, found.weights)}",
    ]
    linears = [layer for layer in found.layers if not layer.name.endswith("norm")]
    return "\n".join([*head, *(_each(linears) if with_layers else _kinds(linears))])


def _each(layers: list[Layer]) -> Iterator[str]:
    width = max((len(layer.name) for layer in layers), default=0)
    for layer in layers:
        yield (
            f"  {layer.name:<{width}}  {_kind(layer):<14}  {layer.nbytes / MIB:8.2f} MiB  "
            f"{_per_weight(layer.nbytes, layer.weights)}{_note(layer)}"
        )


def _kinds(layers: list[Layer]) -> Iterator[str]:
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(_kind(layer) + _note(layer), []).append(layer)
    for kind, those in kinds.items():
        nbytes, weights = sum(one.nbytes for one in those), sum(one.weights for one in those)
        yield f"  {len(those)} x {kind}: {nbytes / MIB:.1f} MiB, {_per_weight(nbytes, weights)}"


def _kind(layer: Layer) -> str:
    return f"W{layer.bits} group {layer.group}" if layer.bits else "dense"


def _note(layer: Layer) -> str:
    return f" ({layer.note})" if layer.note else ""


def _per_weight(nbytes: int, weights: int) -> str:
    return f"{nbytes * 8 / weights:.2f} bits per weight"
