"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from engine_actor.model.registry import FamilyTraits

KEYS = frozenset({"sliding_window", "max_window_layers"})
NEUTRAL: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False,)}
"""A window that only some layers have is not built; published Qwen2 checkpoints switch it off."""


def traits(config: dict[str, Any]) -> FamilyTraits:
    """The biases are part of the family; no key switches them."""
    return FamilyTraits(qkv_bias=True)
