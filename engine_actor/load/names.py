"""Which weights a model has: canonical names, their parts, and the names other formats use.

Knows shapes from ModelConfig and nothing of files. The engine wants q, k and v as one linear
(`layers.0.qkv`) and gate and up as one; checkpoints store the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine_actor.model.config import ModelConfig

_HUB_TOP = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
_HUB_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF_TOP = {"embed": "token_embd", "head": "output", "norm": "output_norm"}
_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One linear as checkpoints store it: weight [rows, in_features of its slot]."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class LinearSlot:
    """One linear of the model, rows of all parts in order; `bias`: whether each part has one."""

    name: str
    parts: tuple[Part, ...]
    in_features: int
    bias: bool = False

    @property
    def rows(self) -> int:
        """N of the whole linear."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True, slots=True)
class VectorSlot:
    """One 1-D weight of a norm."""

    name: str
    size: int


Slot = LinearSlot | VectorSlot


def slots(config: ModelConfig) -> Iterator[Slot]:
    """Every weight of the model in the order a forward pass meets them.

    Lazy, so that a config with an absurd number of layers fails at its first missing tensor.
    The embedding counts as a linear with K = hidden; a tied head has no slot.
    """
    yield _linear("embed", config.vocab_size, config.hidden)
    for index in range(config.n_layers):
        yield from _layer(config, f"layers.{index}.")
    yield VectorSlot("norm", config.hidden)
    if not config.tie_embeddings:
        yield _linear("head", config.vocab_size, config.hidden)


def _layer(config: ModelConfig, at: str) -> Iterator[Slot]:
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield VectorSlot(at + "attn_norm", config.hidden)
    qkv = (Part(at + "q", q_rows), Part(at + "k", kv_rows), Part(at + "v", kv_rows))
    yield LinearSlot(at + "qkv", qkv, config.hidden, config.qkv_bias)
    if config.qk_norm:
        yield VectorSlot(at + "q_norm", config.head_dim)
        yield VectorSlot(at + "k_norm", config.head_dim)
    yield _linear(at + "o", config.hidden, q_rows)
    yield VectorSlot(at + "mlp_norm", config.hidden)
    gate_up = (Part(at + "gate", config.intermediate), Part(at + "up", config.intermediate))
    yield LinearSlot(at + "gate_up", gate_up, config.hidden)
    yield _linear(at + "down", config.hidden, config.intermediate)


def _linear(name: str, rows: int, in_features: int) -> LinearSlot:
    return LinearSlot(name, (Part(name, rows),), in_features)


def hub_name(part: str) -> str:
    """`layers.3.q` -> `model.layers.3.self_attn.q_proj`: Hugging Face's name without `.weight`."""
    if part in _HUB_TOP:
        return _HUB_TOP[part]
    _, index, leaf = part.split(".")
    return f"model.layers.{index}.{_HUB_LAYER[leaf]}"


def gguf_name(part: str) -> str:
    """`layers.3.q` -> `blk.3.attn_q`: llama.cpp's name without `.weight`."""
    if part in _GGUF_TOP:
        return _GGUF_TOP[part]
    _, index, leaf = part.split(".")
    return f"blk.{index}.{_GGUF_LAYER[leaf]}"
