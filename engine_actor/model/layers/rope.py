"""Cosines and signed sines of every position, computed once and looked up once per forward."""

from __future__ import annotations

import torch

from engine_actor.model.config import ModelConfig
from engine_actor.model.rope_config import inverse_frequencies

GROWTH = 1024
"""Positions are added to the tables in steps of this, as prompts reach them."""


class Rotary:
    """cos and sin tables, fp32 [positions, head_dim]; the first half of sin carries its minus."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        scaling = config.rope_scaling
        frequencies = inverse_frequencies(config.rope_theta, config.head_dim, scaling)
        self._frequencies = torch.tensor(frequencies, dtype=torch.float32, device=device)
        self._amplitude = 1.0 if scaling is None else scaling.amplitude
        self._limit = config.max_model_len
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def reach(self, positions: int) -> None:
        """Make the tables hold positions 0..positions-1."""
        if positions <= self._cos.shape[0]:
            return
        count = max(positions, min(-(-positions // GROWTH) * GROWTH, self._limit))
        steps = torch.arange(count, dtype=torch.float32, device=self._frequencies.device)
        angles = torch.outer(steps, self._frequencies)
        cos, sin = angles.cos() * self._amplitude, angles.sin() * self._amplitude
        self._cos = torch.cat((cos, cos), dim=-1)
        self._sin = torch.cat((-sin, sin), dim=-1)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of all positions that reach() has covered."""
        return self._cos, self._sin

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) [T, 1, head_dim] of positions i64[T], which reach() has covered."""
        cos = self._cos.index_select(0, positions).unsqueeze(1)
        sin = self._sin.index_select(0, positions).unsqueeze(1)
        return cos.to(dtype), sin.to(dtype)
