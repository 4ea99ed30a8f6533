"""A GGUF file of the llama architecture as our config and canonical weights.

Undoes llama.cpp's row order of q and k. Knows no tokenizer (gguf_tokenizer.py) and no folder.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import torch

from engine_actor.load.formats.base import Weight, can_fuse, fuse_packed, refuse_leftovers
from engine_actor.load.formats.gguf import GgufFile
from engine_actor.load.formats.gguf_blocks import (
    read_floats,
    select_rows,
    unpack_q4_1,
    unpack_q8_0,
)
from engine_actor.load.names import LinearSlot, Part, VectorSlot, gguf_name, slots
from engine_actor.load.refusal import refusal
from engine_actor.model.config import ModelConfig
from engine_actor.ops import DenseLinear, PackedLinear

ARCHITECTURE = "llama"
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
}


def hub_config(file: GgufFile) -> dict[str, Any]:
    """The config.json a Hugging Face checkpoint of this model would have.

    Raises CheckpointError for another architecture or a llama.* key we do not honour.
    """
    architecture = file.value("general.architecture", str)
    if architecture != ARCHITECTURE:
        raise refusal(
            "general.architecture", f"{architecture!r} cannot be read (supported: {ARCHITECTURE!r})"
        )
    for key in file.metadata:
        if key.startswith("llama.") and key.removeprefix("llama.") not in _KNOWN_KEYS:
            raise refusal(key, f"unknown key in {file.path.name}, we cannot honour it")
    hidden, heads = _size(file, "embedding_length"), _size(file, "attention.head_count")
    head_dim = file.metadata.get("llama.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.metadata.get(f"llama.{key}", head_dim) != head_dim:
            raise refusal(f"llama.{key}", f"must equal the head size {head_dim}")
    tokens = file.value("tokenizer.ggml.tokens", list)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": _size(file, "feed_forward_length"),
        "num_hidden_layers": _size(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _size(file, "attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _size(file, "context_length"),
        "rms_norm_eps": _shortest(file.value("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(file.value("llama.rope.freq_base", float)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **special_ids(file),
    }


def special_ids(file: GgufFile) -> dict[str, int]:
    """bos, eos and pad ids, those of them that the file names."""
    ids = {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in ids.items() if type(value) is int}


def _size(file: GgufFile, key: str) -> int:
    size = file.value(f"llama.{key}", int)
    if size < 1:
        raise refusal(f"llama.{key}", f"{size} must be at least 1")
    return int(size)


def _shortest(value: float) -> float:
    """1e-05 for the f32 9.999999747e-06: the shortest decimal that is the same f32."""
    for digits in range(1, 17):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def canonical_weights(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, Weight]]:
    """(canonical name, weight) in forward order. Raises CheckpointError before the first one
    where a tensor is missing, misshapen or unexpected.
    """
    known = {source for slot in slots(config) for source in _require(file, slot)}
    refuse_leftovers(set(file.tensors), known)
    return _convert(file, config)


def _require(file: GgufFile, slot: LinearSlot | VectorSlot) -> list[str]:
    shapes: dict[str, tuple[int, ...]]
    if isinstance(slot, VectorSlot):
        shapes = {gguf_name(slot.name): (slot.size,)}
    else:
        shapes = {gguf_name(part.name): (part.rows, slot.in_features) for part in slot.parts}
    for name, shape in shapes.items():
        tensor = file.need(name + ".weight")
        if tensor.shape != shape:
            raise refusal(tensor.name, f"shape is {list(tensor.shape)}, must be {list(shape)}")
        if isinstance(slot, VectorSlot) and tensor.type not in ("F32", "F16"):
            raise refusal(tensor.name, f"type is {tensor.type}, must be F32 or F16")
    return [name + ".weight" for name in shapes]


def _convert(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, Weight]]:
    for slot in slots(config):
        if isinstance(slot, VectorSlot):
            tensor = file.need(gguf_name(slot.name) + ".weight")
            yield slot.name, read_floats(tensor.type, file.read(tensor.name), tensor.shape)
            continue
        parts = [(part.name, _linear(file, config, part)) for part in slot.parts]
        packed = [weight for _, weight in parts if isinstance(weight, PackedLinear)]
        dense = [weight for _, weight in parts if isinstance(weight, DenseLinear)]
        if len(packed) == len(parts) and can_fuse(packed):
            yield slot.name, fuse_packed(packed)
        elif len(dense) == len(parts):
            yield slot.name, DenseLinear(torch.cat([weight.weight for weight in dense]), None)
        else:
            yield from parts


def _linear(file: GgufFile, config: ModelConfig, part: Part) -> PackedLinear | DenseLinear:
    tensor = file.need(gguf_name(part.name) + ".weight")
    raw, (rows, columns) = file.read(tensor.name), tensor.shape
    order = _row_order(config, part)
    if tensor.type in ("F32", "F16"):
        weight = read_floats(tensor.type, raw, tensor.shape)
        return DenseLinear(weight if order is None else weight[order], None)
    if tensor.type == "Q4_1":
        layer = unpack_q4_1(tensor.name, raw, rows, columns)
    else:
        layer = unpack_q8_0(raw, rows, columns)
    return layer if order is None else select_rows(layer, order)


def _row_order(config: ModelConfig, part: Part) -> torch.Tensor | None:
    """llama.cpp keeps q and k of this architecture with the two rotated halves of each head
    interleaved; Hugging Face, and we, keep them one after the other.
    """
    if not part.name.endswith((".q", ".k")):
        return None
    heads = part.rows // config.head_dim
    rows = torch.arange(part.rows).view(heads, config.head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)
