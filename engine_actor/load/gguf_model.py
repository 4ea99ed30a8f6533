"""The tensors of a GGUF file as our canonical weights.

Undoes llama.cpp's row order of q and k. Knows no config (gguf_config.py) and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_actor.load.formats.base import Entry, Loaded, Read, Weight, join, refuse_leftovers
from engine_actor.load.formats.gguf import GgufFile, GgufTensor
from engine_actor.load.formats.gguf_blocks import (
    FLOAT_TYPES,
    Bytes,
    read_floats,
    select_rows,
    unpack_q4_0,
    unpack_q4_1,
    unpack_q5_0,
    unpack_q5_1,
    unpack_q8_0,
)
from engine_actor.load.formats.gguf_split import open_gguf
from engine_actor.load.formats.gguf_super_blocks import (
    NOTE,
    unpack_q3_k,
    unpack_q4_k,
    unpack_q5_k,
    unpack_q6_k,
)
from engine_actor.load.formats.imported import with_fields
from engine_actor.load.gguf_rope import FREQUENCIES
from engine_actor.load.names import LinearSlot, Part, VectorSlot, gguf_name, slots
from engine_actor.load.refusal import refusal
from engine_actor.model.config import ModelConfig
from engine_actor.ops import DenseLinear, PackedLinear

INTERLEAVED = "llama"
"""The architecture whose q and k rows llama.cpp reorders."""


@dataclass(frozen=True, slots=True)
class _Type:
    """What a packed tensor type becomes."""

    bits: int
    group: int
    unpack: Callable[[str, Bytes, int, int], PackedLinear]
    note: str = ""


_TYPES = {
    "Q4_0": _Type(4, 32, unpack_q4_0),
    "Q4_1": _Type(4, 32, unpack_q4_1),
    "Q5_0": _Type(8, 32, unpack_q5_0),
    "Q5_1": _Type(8, 32, unpack_q5_1),
    "Q8_0": _Type(8, 32, unpack_q8_0),
    "Q3_K": _Type(3, 16, unpack_q3_k, NOTE),
    "Q4_K": _Type(4, 32, unpack_q4_k, NOTE),
    "Q5_K": _Type(8, 32, unpack_q5_k, NOTE),
    "Q6_K": _Type(8, 16, unpack_q6_k, NOTE),
}


def plan(file: GgufFile, config: ModelConfig) -> list[Entry]:
    """Check every tensor's presence, shape and type on the header. Raises CheckpointError.

    The entries read bytes (u8) of the file's own tensor names; `bits` are those they become.
    """
    entries = [entry for slot in slots(config) for entry in _entries(file, config, slot)]
    used = {source for entry in entries for source in entry.sources}
    refuse_leftovers(set(file.tensors), used | {FREQUENCIES})
    return entries


def canonical_weights(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, Weight]]:
    """(canonical name, weight) in forward order. Raises CheckpointError before the first one
    where a tensor is missing, misshapen or unexpected.
    """
    entries, read = plan(file, config), reader(file)

    def weights() -> Iterator[tuple[str, Weight]]:
        for entry in entries:
            loaded = entry.load(read)
            yield from loaded.items() if isinstance(loaded, dict) else [(entry.name, loaded)]

    return weights()


def _entries(file: GgufFile, config: ModelConfig, slot: LinearSlot | VectorSlot) -> list[Entry]:
    """One entry where all parts become the same kind, else one for each part."""
    if isinstance(slot, VectorSlot):
        tensor = _floats(file, gguf_name(slot.name) + ".weight", (slot.size,))
        return [Entry(slot.name, (tensor.name,), tensor.nbytes, _floats_loader(tensor))]
    is_interleaved = file.metadata.get("general.architecture") == INTERLEAVED
    parts = {
        part.name: _part_entry(file, slot, part, config.head_dim if is_interleaved else 0)
        for part in slot.parts
    }
    if len({(part.bits, part.group) for part in parts.values()}) > 1:
        return list(parts.values())
    first = parts[slot.parts[0].name]

    def load(read: Read) -> Loaded:
        return join(slot.name, {name: _linear(part.load(read)) for name, part in parts.items()})

    return [
        Entry(
            slot.name,
            tuple(source for part in parts.values() for source in part.sources),
            sum(part.nbytes for part in parts.values()),
            load,
            first.bits,
            first.group,
            next((part.note for part in parts.values() if part.note), ""),
        )
    ]


def _linear(loaded: Loaded) -> DenseLinear | PackedLinear:
    assert isinstance(loaded, DenseLinear | PackedLinear)
    return loaded


def _floats(file: GgufFile, name: str, shape: tuple[int, ...]) -> GgufTensor:
    tensor = _shaped(file, name, shape)
    if tensor.type not in FLOAT_TYPES:
        raise refusal(name, f"type is {tensor.type}, must be {' or '.join(FLOAT_TYPES)}")
    return tensor


def _shaped(file: GgufFile, name: str, shape: tuple[int, ...]) -> GgufTensor:
    tensor = file.need(name)
    if tensor.shape != shape:
        raise refusal(name, f"shape is {list(tensor.shape)}, must be {list(shape)}")
    return tensor


def _floats_loader(tensor: GgufTensor) -> Callable[[Read], torch.Tensor]:
    return lambda read: read_floats(tensor.type, read(tensor.name).numpy().data, tensor.shape)


def _part_entry(file: GgufFile, slot: LinearSlot, part: Part, interleaved: int) -> Entry:
    at = gguf_name(part.name)
    weight = _shaped(file, f"{at}.weight", (part.rows, slot.in_features))
    bias = _floats(file, f"{at}.bias", (part.rows,)) if slot.bias else None
    kind = _TYPES.get(weight.type)
    read_bias = _floats_loader(bias) if bias else None

    def load(read: Read) -> Loaded:
        order = _row_order(interleaved, part)
        raw = read(weight.name).numpy().data
        vector = read_bias(read) if read_bias else None
        if kind is None:
            matrix = read_floats(weight.type, raw, weight.shape)
            return DenseLinear(matrix if order is None else matrix[order], vector)
        layer = kind.unpack(weight.name, raw, *weight.shape)
        layer = layer if order is None else select_rows(layer, order)
        return layer if vector is None else with_fields(layer, bias=vector)

    tensors = [tensor for tensor in (weight, bias) if tensor is not None]
    sources, nbytes = tuple(t.name for t in tensors), sum(t.nbytes for t in tensors)
    if kind is None:
        return Entry(part.name, sources, nbytes, load)
    return Entry(part.name, sources, nbytes, load, kind.bits, kind.group, kind.note)


def _row_order(interleaved: int, part: Part) -> torch.Tensor | None:
    """llama.cpp keeps q and k of this architecture with the two rotated halves of each head
    interleaved; Hugging Face, and we, keep them one after the other. `interleaved` is the size of
    such a head, or 0.
    """
    if not interleaved or not part.name.endswith((".q", ".k")):
        return None
    rows = torch.arange(part.rows).view(-1, interleaved // 2, 2)
    return rows.transpose(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """A file whose header was read: its bytes, when they are wanted."""

    path: Path
    digest: str

    @contextmanager
    def reading(self) -> Iterator[Read]:
        """A function name -> u8 tensor, a copy. Raises CheckpointError where the file changed."""
        with open_gguf(self.path) as file:
            if file.digest != self.digest:
                raise refusal(self.path, "was changed since it was checked")
            yield reader(file)


def reader(file: GgufFile) -> Read:
    """name -> u8 tensor, a copy."""
    return lambda name: torch.frombuffer(bytearray(file.read(name)), dtype=torch.uint8)
