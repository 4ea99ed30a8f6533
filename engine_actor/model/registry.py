"""Which model families there are: architecture name of a config.json -> family module, lazily."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, cast

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class FamilyTraits:
    """What one config.json says about the points in which families differ."""

    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None


class Family(Protocol):
    """A family module: its own keys, their only honoured values, and its traits."""

    NEUTRAL: dict[str, tuple[Any, ...]]
    KEYS: frozenset[str]

    def traits(self, config: dict[str, Any]) -> FamilyTraits: ...


def family_of(name: str) -> Family:
    """The module of a family of FAMILIES."""
    return cast(Family, importlib.import_module(f"engine_actor.model.{name}"))
