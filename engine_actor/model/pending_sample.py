"""Tokens that the device may still be making, and the host's wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine_actor.core.plan import SampledToken


class BrokenLogits(ArithmeticError):
    """The model gave a row that is no distribution (NaN, or nothing finite): there is no token."""


class PendingSample(Protocol):
    """What Sampler.begin() left to be read."""

    def result(self) -> list[SampledToken]:
        """The tokens in the rows' order, once they are on the host. Raises BrokenLogits where a
        row had no finite maximum; no row has a token then.
        """
        ...


class SampledAtOnce:
    """Sampling that ran inside begin(): its tokens, or why there are none."""

    def __init__(self, tokens: Sequence[SampledToken], error: BrokenLogits | None = None) -> None:
        self._tokens = list(tokens)
        self._error = error

    def result(self) -> list[SampledToken]:
        """See PendingSample."""
        if self._error is not None:
            raise self._error
        return self._tokens


def put_tokens(
    tokens: Sequence[SampledToken], token_buffer: torch.Tensor | None, slots: Sequence[int]
) -> None:
    """token_buffer[slots[i]] = tokens[i], i64, in one copy and one scatter."""
    if token_buffer is None or not tokens:
        return
    ids = torch.tensor([[*slots], [one.token for one in tokens]], dtype=torch.int64)
    places, values = ids.to(token_buffer.device).unbind(0)
    token_buffer.index_copy_(0, places, values)
