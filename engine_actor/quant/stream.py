"""A checkpoint one layer at a time, dequantised to fp32, whatever format it is stored in.

A file is mapped only while one layer is read: what was read before costs no memory. Knows names
and shapes, no method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine_actor.load.checkpoint import Checkpoint
from engine_actor.load.formats.base import Entry, Weight
from engine_actor.load.names import LinearSlot, slots
from engine_actor.load.refusal import refusal
from engine_actor.ops import DenseLinear, PackedLinear, dequantise, moved
from engine_actor.quant.grid import LARGEST

LINEARS = ("qkv", "o", "gate_up", "down")
"""The linears of a layer in the order a forward pass meets them."""


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A linear as numbers: weight fp32 [N, K], bias [N] as stored or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer: its linears by short name (LINEARS) and its norms by short name, 1-D as stored."""

    linears: dict[str, Dense]
    norms: dict[str, torch.Tensor]


class LayerReader:
    """The weights of a checkpoint by layer. Raises CheckpointError for one that is not finite."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._slots = {s.name: s for s in slots(checkpoint.config) if isinstance(s, LinearSlot)}
        self._entries: dict[str, list[Entry]] = {}
        for entry in checkpoint.entries:
            self._entries.setdefault(_place(entry.name), []).append(entry)

    def layer(self, index: int) -> LayerWeights:
        """Layer `index` on the device."""
        at = f"layers.{index}."
        found = self._read(at)
        norms = {n.removeprefix(at): _vector(n, w) for n, w in found.items() if n.endswith("norm")}
        linears = {}
        for short in LINEARS:
            linears[short] = self._linear(at + short, found)
        return LayerWeights(linears, {n: norm.to(self._device) for n, norm in norms.items()})

    def top(self, name: str) -> Weight:
        """`embed`, `norm` or `head` as stored, on the CPU; KeyError for a tied model's head."""
        return self._read(name)[name]

    def _read(self, place: str) -> dict[str, Weight]:
        """Every weight of a layer (or the one named), copied out of the mapped file."""
        return dict(self._load(place))

    def _load(self, place: str) -> Iterator[tuple[str, Weight]]:
        with self._checkpoint.source.reading() as read:
            for entry in self._entries[place]:
                loaded = entry.load(read)
                pairs = loaded.items() if isinstance(loaded, dict) else [(entry.name, loaded)]
                for name, weight in pairs:
                    yield name, _unmapped(weight)

    def _linear(self, name: str, found: dict[str, Weight]) -> Dense:
        """The whole linear, its parts joined where the checkpoint has them apart."""
        slot = self._slots[name]
        names = [name] if name in found else [part.name for part in slot.parts]
        parts = [_dense(n, found[n], self._device) for n in names]
        biases = [part.bias for part in parts if part.bias is not None]
        if len(parts) == 1:
            return parts[0]
        weight = torch.cat([part.weight for part in parts])
        return Dense(weight, torch.cat(biases) if biases else None)


def _place(name: str) -> str:
    """`layers.3.qkv` -> `layers.3.`, `embed` -> `embed`."""
    parts = name.split(".")
    return f"layers.{parts[1]}." if parts[0] == "layers" else name


def _unmapped(weight: Weight) -> Weight:
    """A copy of what may be a view of the file; unpacking copies a packed one anyway."""
    if isinstance(weight, DenseLinear):
        bias = None if weight.bias is None else weight.bias.clone()
        return DenseLinear(weight.weight.clone(), bias)
    if isinstance(weight, PackedLinear):
        return weight
    return weight.clone()


def on_device(weight: Weight, device: torch.device) -> Weight:
    """The same weight there. Packed bytes are the smallest form to carry, and a GPU unpacks them
    in no time.
    """
    return weight.to(device) if isinstance(weight, torch.Tensor) else moved(weight, device)


def as_matrix(weight: Weight) -> torch.Tensor:
    """fp32 [N, K] of a linear in any form, where its tensors are."""
    if isinstance(weight, PackedLinear):
        return dequantise(weight)
    if isinstance(weight, DenseLinear):
        return weight.weight.float()
    return weight.float()


def _dense(name: str, weight: Weight, device: torch.device) -> Dense:
    matrix = as_matrix(on_device(weight, device))
    if not bool(torch.isfinite(matrix).all()):
        raise refusal(name, "holds NaN or infinity, nothing can be made of it")
    if matrix.numel() and float(matrix.abs().max()) > LARGEST:
        raise refusal(name, f"holds weights over {LARGEST:.0f}, beyond any fp16 scale")
    bias = getattr(weight, "bias", None)
    return Dense(matrix, None if bias is None else bias.to(device))


def _vector(name: str, weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    if not bool(torch.isfinite(weight).all()):
        raise refusal(name, "holds NaN or infinity, nothing can be made of it")
    return weight
