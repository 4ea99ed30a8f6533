"""Llama, and everything that is Llama in all but name (SmolLM2, Llama 3.x, TinyLlama).

The shared decoder as it stands: no biases, no norm on queries and keys, full attention.
"""

from __future__ import annotations

from typing import Any

from engine_actor.model.registry import FamilyTraits

KEYS = frozenset({"pretraining_tp", "is_llama_config", "rope_interleaved"})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
}


def traits(config: dict[str, Any]) -> FamilyTraits:
    """Llama has none of the differences."""
    return FamilyTraits()
