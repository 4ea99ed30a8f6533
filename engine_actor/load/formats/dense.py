"""Plain Hugging Face checkpoints: fp32, fp16 or bf16 weights, sharded or not, tied or not.

Knows names and shapes; computes nothing but the row-wise fusion of q, k, v and of gate, up.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_actor.load.formats.base import (
    FLOATS,
    Entry,
    Read,
    Weight,
    fuse_dense,
    refuse_leftovers,
)
from engine_actor.load.names import LinearSlot, VectorSlot, hub_name, slots
from engine_actor.load.shards import ShardSet
from engine_actor.model.config import ModelConfig
from engine_actor.ops import DenseLinear


def plan(config: ModelConfig, shards: ShardSet) -> list[Entry]:
    """Check every tensor's presence, shape and dtype on the headers. Raises CheckpointError."""
    entries = [
        _vector(slot, shards) if isinstance(slot, VectorSlot) else _linear(slot, shards)
        for slot in slots(config)
    ]
    used = {source for entry in entries for source in entry.sources}
    refuse_leftovers(set(shards.tensors), used | ignorable(config, shards))
    return entries


def ignorable(config: ModelConfig, shards: ShardSet) -> set[str]:
    """Tensors that old exporters wrote and that hold nothing of their own."""
    names = {name for name in shards.tensors if name.endswith(".rotary_emb.inv_freq")}
    if config.tie_embeddings:
        names.add("lm_head.weight")  # a copy of the embedding, by the config's own word
    return names


def _vector(slot: VectorSlot, shards: ShardSet) -> Entry:
    source = hub_name(slot.name) + ".weight"
    info = shards.need(source)
    info.require(FLOATS, (slot.size,))
    return Entry(slot.name, (source,), info.nbytes, lambda read: read(source))


def _linear(slot: LinearSlot, shards: ShardSet) -> Entry:
    sources: list[str] = []
    for part in slot.parts:
        weight = hub_name(part.name) + ".weight"
        shards.need(weight).require(FLOATS, (part.rows, slot.in_features))
        sources.append(weight)
        if slot.bias:
            bias = hub_name(part.name) + ".bias"
            shards.need(bias).require(FLOATS, (part.rows,))
            sources.append(bias)
    nbytes = sum(shards.tensors[source].nbytes for source in sources)
    return Entry(slot.name, tuple(sources), nbytes, _linear_loader(slot))


def _linear_loader(slot: LinearSlot) -> Callable[[Read], Weight]:
    def load(read: Read) -> Weight:
        parts = [
            DenseLinear(
                read(hub_name(part.name) + ".weight"),
                read(hub_name(part.name) + ".bias") if slot.bias else None,
            )
            for part in slot.parts
        ]
        return fuse_dense(parts)

    return load
