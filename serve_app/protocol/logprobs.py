"""Logprobs in the two shapes OpenAI has: legacy completions and chat. Always finite JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine_actor.core.plan import TokenLogprobs

LOWEST = -9999.0
"""What stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of a choice: `offset` in characters of the choice's text. `scored` is None for
    the first echoed token, which nothing predicts.
    """

    token: int
    offset: int
    scored: TokenLogprobs | None


def finite(logprob: float) -> float:
    """A logprob as JSON can carry it."""
    return logprob if math.isfinite(logprob) and logprob > LOWEST else LOWEST


def legacy(
    entries: Sequence[TokenEntry], top: int, token_text: Callable[[int], str]
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions: four parallel lists.

    Each top_logprobs dict holds the `top` best and the chosen token; where two ids print as the
    same text, the better one stands.
    """
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.scored is None:
            tops.append(None)
            continue
        row: dict[str, float] = {}
        for token, logprob in entry.scored.top[:top]:
            row.setdefault(token_text(token), finite(logprob))
        row.setdefault(token_text(entry.token), finite(entry.scored.logprob))
        tops.append(row)
    return {
        "tokens": [token_text(entry.token) for entry in entries],
        "token_logprobs": [
            None if entry.scored is None else finite(entry.scored.logprob) for entry in entries
        ],
        "top_logprobs": tops,
        "text_offset": [entry.offset for entry in entries],
    }


def chat(
    entries: Sequence[TokenEntry],
    top: int,
    token_text: Callable[[int], str],
    token_bytes: Callable[[int], bytes],
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/chat/completions."""

    def scored(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(token),
            "logprob": finite(logprob),
            "bytes": list(token_bytes(token)),
        }

    content = [
        {
            **scored(entry.token, entry.scored.logprob),
            "top_logprobs": [scored(*pair) for pair in entry.scored.top[:top]],
        }
        for entry in entries
        if entry.scored is not None
    ]
    return {"content": content, "refusal": None}


def mean(entries: Sequence[TokenEntry]) -> float:
    """Mean logprob of the scored tokens, the rank of a `best_of` candidate; empty is lowest."""
    scored = [finite(entry.scored.logprob) for entry in entries if entry.scored is not None]
    return sum(scored) / len(scored) if scored else LOWEST
