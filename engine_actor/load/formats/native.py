"""Our packed folder: the tensors of PackedLinear as they are, under canonical names.

config.json carries `quantization_config`: quant_method `deepinfer`, format_version, `linears`
(name -> bits and group of each packed linear) and `source`. Everything not in `linears` is dense.
A linear `x` is stored as x.qweight, x.scales and what it has of x.offsets, x.zeros, x.bias, x.perm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine_actor.load.formats.base import (
    FLOATS,
    Entry,
    Read,
    Weight,
    refuse_leftovers,
    require_group,
)
from engine_actor.load.names import LinearSlot, VectorSlot, slots
from engine_actor.load.refusal import refusal
from engine_actor.load.shards import ShardSet
from engine_actor.model.config import ModelConfig
from engine_actor.ops import DenseLinear, PackedLinear

METHOD = "deepinfer"
FORMAT_VERSION = 1
BITS = (3, 4, 8)
SECTION = "quantization_config"


def plan(config: ModelConfig, shards: ShardSet, section: dict[str, Any]) -> list[Entry]:
    """Check every tensor's presence, shape and dtype on the headers. Raises CheckpointError."""
    linears = _read_section(section)
    entries: list[Entry] = []
    for slot in slots(config):
        if isinstance(slot, VectorSlot):
            entries.append(_vector(slot, shards))
        else:
            entries.extend(_linear(piece, shards, linears) for piece in _pieces(slot, shards))
    names = {entry.name for entry in entries}
    if lost := sorted(linears.keys() - names):
        raise refusal(f"{SECTION}.linears", f"names {lost[0]}, which the model does not have")
    used = {source for entry in entries for source in entry.sources}
    refuse_leftovers(set(shards.tensors), used)
    return entries


def _read_section(section: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Name -> (bits, group) of each packed linear."""
    version = section.get("format_version")
    if version != FORMAT_VERSION:
        raise refusal(
            f"{SECTION}.format_version", f"is {version!r}, this release reads {FORMAT_VERSION}"
        )
    known = {"quant_method", "format_version", "linears", "source"}
    if unknown := sorted(section.keys() - known):
        raise refusal(f"{SECTION}.{unknown[0]}", "unknown key")
    linears = section.get("linears")
    if not isinstance(linears, dict):
        raise refusal(f"{SECTION}.linears", "must map each packed linear to its bits and group")
    return {name: _bits_and_group(name, value) for name, value in linears.items()}


def _bits_and_group(name: str, value: Any) -> tuple[int, int]:
    where = f"{SECTION}.linears.{name}"
    if not isinstance(value, dict) or value.keys() != {"bits", "group"}:
        raise refusal(where, "must have exactly bits and group")
    bits, group = value["bits"], value["group"]
    if type(bits) is not int or bits not in BITS:
        raise refusal(where, f"bits {bits!r} must be one of {', '.join(map(str, BITS))}")
    return bits, require_group(f"{where}.group", group)


def _pieces(slot: LinearSlot, shards: ShardSet) -> Iterator[LinearSlot]:
    """The slot itself, or its parts where the writer could not fuse them."""
    first = slot.parts[0].name
    split = f"{first}.qweight" in shards.tensors or f"{first}.weight" in shards.tensors
    if len(slot.parts) == 1 or not split:
        yield slot
        return
    for part in slot.parts:
        yield LinearSlot(part.name, (part,), slot.in_features, slot.bias)


def _vector(slot: VectorSlot, shards: ShardSet) -> Entry:
    source = f"{slot.name}.weight"
    info = shards.need(source)
    info.require(FLOATS, (slot.size,))
    return Entry(slot.name, (source,), info.nbytes, lambda read: read(source))


def _linear(slot: LinearSlot, shards: ShardSet, linears: dict[str, tuple[int, int]]) -> Entry:
    if slot.name not in linears:
        return _dense(slot, shards)
    bits, group = linears[slot.name]
    fields = _packed_fields(slot, shards, bits, group)
    in_features = slot.in_features

    def load(read: Read) -> Weight:
        tensors = {field: read(source) for field, source in fields.items()}
        return PackedLinear(bits, group, in_features, **tensors)

    sources = tuple(fields.values())
    nbytes = sum(shards.tensors[source].nbytes for source in sources)
    return Entry(slot.name, sources, nbytes, load, bits, group)


def _packed_fields(slot: LinearSlot, shards: ShardSet, bits: int, group: int) -> dict[str, str]:
    """Field of PackedLinear -> tensor name, each checked."""
    rows, columns = slot.rows, slot.in_features
    groups = 1 if group == -1 else -(-columns // group)
    rules: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "qweight": (("U8",), (rows, -(-columns * bits // 8))),
        "scales": (("F16",), (rows, groups)),
        "offsets": (("F16", "F32"), (rows, groups)),
        "zeros": (("I8",), (rows, groups)),
        "bias": (FLOATS, (rows,)),
        "perm": (("I32",), (columns,)),
    }
    needed = {"qweight", "scales"} | ({"bias"} if slot.bias else set())
    fields: dict[str, str] = {}
    for field, (dtypes, shape) in rules.items():
        source = f"{slot.name}.{field}"
        if field == "bias" and not slot.bias:
            continue
        if field in needed or source in shards.tensors:
            shards.need(source).require(dtypes, shape)
            fields[field] = source
    if "offsets" in fields and "zeros" in fields:
        raise refusal(slot.name, "has both offsets and zeros; a linear has one of them or none")
    return fields


def _dense(slot: LinearSlot, shards: ShardSet) -> Entry:
    weight, bias = f"{slot.name}.weight", f"{slot.name}.bias"
    if weight not in shards.tensors and f"{slot.name}.qweight" in shards.tensors:
        raise refusal(f"{SECTION}.linears", f"does not name {slot.name}, whose tensors are packed")
    shards.need(weight).require(FLOATS, (slot.rows, slot.in_features))
    sources = [weight]
    if slot.bias:
        shards.need(bias).require(FLOATS, (slot.rows,))
        sources.append(bias)
    nbytes = sum(shards.tensors[source].nbytes for source in sources)

    def load(read: Read) -> Weight:
        return DenseLinear(read(weight), read(bias) if slot.bias else None)

    return Entry(slot.name, tuple(sources), nbytes, load)
