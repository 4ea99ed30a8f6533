"""What the readers of other people's packed safetensors share: Hugging Face names, part by part.

A format says how one linear is stored (`Find`); this says which linears there are, joins q, k, v
and gate, up, and refuses what is left over. Knows no bit layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_actor.load.formats.base import (
    FLOATS,
    Entry,
    Loaded,
    Read,
    join,
    refuse_leftovers,
)
from engine_actor.load.formats.dense import ignorable
from engine_actor.load.names import LinearSlot, Part, VectorSlot, hub_name, slots
from engine_actor.load.refusal import refusal
from engine_actor.load.shards import ShardSet
from engine_actor.model.config import ModelConfig
from engine_actor.ops import DenseLinear, PackedLinear, dequantise

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """One packed part: its tensors, checked on headers, and how they become a PackedLinear."""

    bits: int
    group: int
    sources: tuple[str, ...]
    load: Callable[[Read], PackedLinear]


Find = Callable[[str, int, int], Stored | None]
"""(Hugging Face's name without suffix, rows, columns) -> how it is packed; None: it is dense."""


def plan(config: ModelConfig, shards: ShardSet, find: Find) -> list[Entry]:
    """Check every tensor's presence, shape and dtype on the headers. Raises CheckpointError."""
    entries: list[Entry] = []
    for slot in slots(config):
        if isinstance(slot, VectorSlot):
            source = hub_name(slot.name) + ".weight"
            shards.need(source).require(FLOATS, (slot.size,))
            entries.append(_entry(slot.name, (source,), shards, _reader(source)))
        else:
            entries.extend(_linear(slot, shards, find))
    used = {source for entry in entries for source in entry.sources}
    refuse_leftovers(set(shards.tensors), used | ignorable(config, shards))
    return entries


def _entry(
    name: str,
    sources: tuple[str, ...],
    shards: ShardSet,
    load: Callable[[Read], Loaded],
    kind: tuple[int, int] = (0, 0),
) -> Entry:
    nbytes = sum(shards.tensors[source].nbytes for source in sources)
    return Entry(name, sources, nbytes, load, *kind)


def _reader(source: str) -> Callable[[Read], Loaded]:
    return lambda read: read(source)


def _linear(slot: LinearSlot, shards: ShardSet, find: Find) -> list[Entry]:
    """One entry where all parts are stored alike, else one for each part."""
    stored = {part: find(hub_name(part.name), part.rows, slot.in_features) for part in slot.parts}
    kinds = {(one.bits, one.group) if one else (0, 0) for one in stored.values()}
    sources = {part: _sources(slot, part, shards, stored[part]) for part in slot.parts}
    loads = {part: _part_loader(slot, part, sources[part], stored[part]) for part in slot.parts}
    if len(kinds) > 1:
        return [
            _entry(part.name, sources[part], shards, loads[part], _kind(stored[part]))
            for part in slot.parts
        ]
    together = tuple(source for part in slot.parts for source in sources[part])

    def load(read: Read) -> Loaded:
        return join(slot.name, {part.name: loads[part](read) for part in slot.parts})

    return [_entry(slot.name, together, shards, load, kinds.pop())]


def _kind(stored: Stored | None) -> tuple[int, int]:
    return (stored.bits, stored.group) if stored else (0, 0)


def _sources(
    slot: LinearSlot, part: Part, shards: ShardSet, stored: Stored | None
) -> tuple[str, ...]:
    weight, bias = hub_name(part.name) + ".weight", hub_name(part.name) + ".bias"
    if stored is None:
        shards.need(weight).require(FLOATS, (part.rows, slot.in_features))
    sources = (weight,) if stored is None else stored.sources
    # Old GPTQ writers gave every linear a bias; one the family does not have must be all zero.
    if slot.bias or (stored is not None and bias in shards.tensors):
        shards.need(bias).require(FLOATS, (part.rows,))
        sources = (*sources, bias)
    return sources


def _part_loader(
    slot: LinearSlot, part: Part, sources: tuple[str, ...], stored: Stored | None
) -> Callable[[Read], DenseLinear | PackedLinear]:
    weight, bias_name = hub_name(part.name) + ".weight", hub_name(part.name) + ".bias"

    def load(read: Read) -> DenseLinear | PackedLinear:
        bias = read(bias_name) if bias_name in sources else None
        if bias is not None and not slot.bias:
            if bool(bias.any()):
                raise refusal(bias_name, "is not zero, and this model family has no such bias")
            bias = None
        if stored is None:
            return DenseLinear(read(weight), bias)
        return narrow(hub_name(part.name), stored.load(read), bias)

    return load


def narrow(name: str, layer: PackedLinear, bias: torch.Tensor | None) -> DenseLinear | PackedLinear:
    """The layer with its scales in fp16 if that loses nothing, else as a dense fp32 matrix.

    Raises CheckpointError where a scale is not finite.
    """
    if not bool(torch.isfinite(layer.scales).all()):
        raise refusal(name, "has a scale that is not finite")
    half = layer.scales.half()
    if torch.equal(half.float(), layer.scales.float()):
        return with_fields(layer, scales=half, bias=bias)
    LOGGER.warning("%s: its scales are no fp16 numbers; kept as a dense fp32 matrix", name)
    return DenseLinear(dequantise(layer), None if bias is None else bias.float())


def with_fields(layer: PackedLinear, **changes: torch.Tensor | None) -> PackedLinear:
    """A copy of the layer with other tensors."""
    fields = {name: getattr(layer, name) for name in ("offsets", "zeros", "bias", "perm")}
    fields |= {"qweight": layer.qweight, "scales": layer.scales, **changes}
    return PackedLinear(layer.bits, layer.group, layer.in_features, **fields)


def signed_zeros(zeros: torch.Tensor, bits: int) -> torch.Tensor | None:
    """Unsigned zero points [N, G] -> i8 of our codes; None where all of them are the middle."""
    signed = zeros - (1 << (bits - 1))
    return signed.to(torch.int8).contiguous() if bool(signed.any()) else None


def order_of(name: str, g_idx: torch.Tensor, group: int, groups: int) -> torch.Tensor | None:
    """From the group of every column, i32[K], to `perm`; None where columns are in order.

    Raises CheckpointError where the groups are not `group` columns each (the last may be short).
    """
    columns = len(g_idx)
    plain = torch.arange(columns, dtype=torch.int32) // group
    if torch.equal(g_idx, plain):
        return None
    perm = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[perm], plain):
        low, high = int(g_idx.min()), int(g_idx.max())
        if low < 0 or high >= groups:
            raise refusal(name, f"names group {low if low < 0 else high} of {groups}")
        raise refusal(name, f"its groups do not have {group} columns each; we cannot hold that")
    return perm.to(torch.int32)
