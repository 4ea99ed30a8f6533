"""Mistral: Llama with an optional sliding window over the keys in every layer."""

from __future__ import annotations

from typing import Any

from engine_actor.model.registry import FamilyTraits

KEYS = frozenset({"sliding_window"})
NEUTRAL: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}


def traits(config: dict[str, Any]) -> FamilyTraits:
    """A row sees itself and the `sliding_window - 1` keys before it; None: all of them."""
    return FamilyTraits(sliding_window=config.get("sliding_window"))
