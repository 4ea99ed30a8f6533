"""The config.json that a GGUF file's metadata stands for.

Reads keys only, and the one tensor that says how the rotary embedding is scaled (gguf_rope.py).
"""

from __future__ import annotations

import struct
from typing import Any

from engine_actor.load.formats.gguf import GgufFile
from engine_actor.load.gguf_rope import rope_section
from engine_actor.load.refusal import refusal

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""general.architecture -> ours. Mistral's files call themselves llama."""
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
    "rope.scaling.type",
    "rope.scaling.factor",
    "vocab_size",
}


def hub_config(file: GgufFile) -> dict[str, Any]:
    """The config.json a Hugging Face checkpoint of this model would have.

    Raises CheckpointError for another architecture or a key of its own that we do not honour.
    """
    name = _architecture(file)
    hidden, heads = _size(file, name, "embedding_length"), _size(file, name, "attention.head_count")
    named = f"{name}.attention.key_length" in file.metadata
    head_dim = _size(file, name, "attention.key_length") if named else hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.metadata.get(f"{name}.{key}", head_dim) != head_dim:
            raise refusal(f"{name}.{key}", f"must equal the head size {head_dim}")
    tokens = file.value("tokenizer.ggml.tokens", list)
    theta = _shortest(file.value(f"{name}.rope.freq_base", float))
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "dtype": "bfloat16",
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": _size(file, name, "feed_forward_length"),
        "num_hidden_layers": _size(file, name, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _size(file, name, "attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _size(file, name, "context_length"),
        "rms_norm_eps": _shortest(file.value(f"{name}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "rope_scaling": rope_section(file, name, theta, head_dim),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **special_ids(file),
    }


def _architecture(file: GgufFile) -> str:
    """Its name, where every key of it is one that we honour. Raises CheckpointError."""
    name = file.value("general.architecture", str)
    if name not in ARCHITECTURES:
        known = ", ".join(repr(known) for known in ARCHITECTURES)
        raise refusal("general.architecture", f"{name!r} cannot be read (supported: {known})")
    for key, value in file.metadata.items():
        known_key = key.removeprefix(f"{name}.") in _KNOWN_KEYS
        # A key that is switched off (zero, empty) asks for nothing.
        if key.startswith(f"{name}.") and not known_key and value:
            raise refusal(key, f"unknown key in {file.path.name}, we cannot honour it")
    return name


def special_ids(file: GgufFile) -> dict[str, int]:
    """bos, eos and pad ids, those of them that the file names."""
    ids = {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in ids.items() if type(value) is int}


def _size(file: GgufFile, name: str, key: str) -> int:
    size = file.value(f"{name}.{key}", int)
    if size < 1:
        raise refusal(f"{name}.{key}", f"{size} must be at least 1")
    return int(size)


def _shortest(value: float) -> float:
    """1e-05 for the f32 9.999999747e-06: the shortest decimal that is the same f32."""
    for digits in range(1, 17):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
