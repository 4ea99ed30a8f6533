"""`/v1/models`: what is served, and how long a request may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it. `created` in unix seconds; `meta` is shown as it is.
    `eos_token_ids` end a text.
    """

    name: str
    created: int
    max_model_len: int
    kv_tokens: int
    vocab_size: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request: prompt and completion."""
        return min(self.max_model_len, self.kv_tokens)

    def card(self) -> dict[str, Any]:
        """OpenAI's model object, with the limits that a client asks for next."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "deepinfer-sm86",
            "max_model_len": self.max_model_len,
            "meta": {"vocab_size": self.vocab_size, "kv_tokens": self.kv_tokens, **self.meta},
        }


def model_list(models: list[ServedModel]) -> dict[str, Any]:
    """OpenAI's list of models."""
    return {"object": "list", "data": [model.card() for model in models]}
