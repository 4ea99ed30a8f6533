"""Sampling parameters of one request, validated once, at the door.

Knows nothing of HTTP, tensors or tokenizers. `serve_app.protocol` builds it, the engine's
sampler reads it; both sides see the same frozen object.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
SEED_BITS = 64


class InvalidParam(ValueError):
    """A request parameter has a value we refuse. `name` is the public parameter name."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name
        self.why = why


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is sampled and when it ends.

    `top_k` 0 means off. `logprobs` is the number of alternatives to report per generated token
    (0 = only the chosen token's), None = no logprobs. `prompt_logprobs` is the same for every
    prompt position but the first (OpenAI's `echo` with `logprobs`); such a request does not read
    the prefix cache. Stop strings live in the ingress, which owns the text; it sends a cancel with
    reason `stop_string`. Raises InvalidParam.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require_range("max_tokens", self.max_tokens, 0, None)
        _require_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _require_range("temperature", self.temperature, 0.0, 2.0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidParam("top_p", f"must be in (0, 1], got {self.top_p}")
        _require_range("top_k", self.top_k, 0, None)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 10.0:
            why = f"must be in (0, 10], got {self.repetition_penalty}"
            raise InvalidParam("repetition_penalty", why)
        for _, bias in self.logit_bias:
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise InvalidParam("logit_bias", f"values must be in [-100, 100], got {bias}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require_range(name, value, 0, MAX_TOP_LOGPROBS)
        bound = 2 ** (SEED_BITS - 1)
        if self.seed is not None and not -bound <= self.seed < bound:
            raise InvalidParam("seed", "must fit in a signed 64-bit integer")

    @property
    def greedy(self) -> bool:
        """True where sampling is an argmax. Below 1e-5 a temperature only produces inf and NaN."""
        return self.temperature < 1e-5

    def require_vocabulary(self, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        """Refuse token ids outside 0..vocab_size-1 in logit_bias and stop_token_ids, and a
        min_tokens that forbids the whole vocabulary: nothing would be left to draw.
        """
        for token, _ in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise InvalidParam("logit_bias", f"token id {token} is not in 0..{vocab_size - 1}")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                why = f"token id {token} is not in 0..{vocab_size - 1}"
                raise InvalidParam("stop_token_ids", why)
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        if self.min_tokens and len(ends) >= vocab_size:
            raise InvalidParam("stop_token_ids", "leave no token for the first min_tokens")


def _require_range(name: str, value: float, low: float, high: float | None) -> None:
    # An int is always finite, but one of 400 digits is no float and too long to be shown.
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidParam(name, f"must be finite, got {value}")
    if value < low or (high is not None and value > high):
        bound = f"in [{low}, {high}]" if high is not None else f"at least {low}"
        shown = value if abs(value) < 1e18 else "a huge number"
        raise InvalidParam(name, f"must be {bound}, got {shown}")
