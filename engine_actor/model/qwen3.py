"""Qwen3 (dense): Llama with an RMS norm over each query and key head, before the rotation."""

from __future__ import annotations

from typing import Any

from engine_actor.model.registry import FamilyTraits

KEYS = frozenset({"sliding_window", "max_window_layers"})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False,),
    "attention_bias": (False,),
}


def traits(config: dict[str, Any]) -> FamilyTraits:
    """The norms are part of the family; no key switches them."""
    return FamilyTraits(qk_norm=True)
