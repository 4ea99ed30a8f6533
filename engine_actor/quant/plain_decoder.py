"""A decoder layer over whole rows of text in plain torch that autograd can follow: no cache.

The same layer as model/decoder.py for the one case that every sequence starts at position 0 and has
the same length. Knows neither where weights come from nor what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from engine_actor.model.config import ModelConfig
from engine_actor.model.layers.rope import Rotary

RowsFn = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Of rows of one length: cos, sin [T, 1, head_dim]; unseen bool [T, T]: keys that a query may
    not see.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    unseen: torch.Tensor

    @staticmethod
    def of(config: ModelConfig, length: int, device: torch.device) -> Places:
        """Causal, and within the window where the model has one."""
        rotary = Rotary(config, device)
        rotary.reach(length)
        places = torch.arange(length, device=device)
        back = places.unsqueeze(1) - places
        unseen = back < 0
        if config.sliding_window is not None:
            unseen |= back >= config.sliding_window
        return Places(*rotary.at(places, torch.float32), unseen)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def decoder_layer(
    config: ModelConfig,
    linears: Mapping[str, RowsFn],
    norms: Mapping[str, RowsFn],
    x: torch.Tensor,
    places: Places,
) -> torch.Tensor:
    """x [S, T, hidden] behind one layer, by short names of linears and norms."""
    x = x + linears["o"](_attended(config, linears["qkv"], norms, norms["attn_norm"](x), places))
    gate, up = linears["gate_up"](norms["mlp_norm"](x)).chunk(2, dim=-1)
    return x + linears["down"](silu(gate) * up)


def _attended(
    config: ModelConfig,
    qkv: RowsFn,
    norms: Mapping[str, RowsFn],
    x: torch.Tensor,
    places: Places,
) -> torch.Tensor:
    queries, kv, size = config.n_heads, config.n_kv_heads, config.head_dim
    heads = qkv(x).unflatten(-1, (queries + 2 * kv, size))
    q, k, v = heads.split((queries, kv, kv), dim=2)
    if config.qk_norm:
        q, k = norms["q_norm"](q), norms["k_norm"](k)
    q, k = (part * places.cos + part.roll(size // 2, -1) * places.sin for part in (q, k))
    # Plain products: their backward gives the same bits every time, the fused ones' need not.
    q = q.transpose(1, 2).unflatten(1, (kv, queries // kv))
    k, v = k.transpose(1, 2).unsqueeze(2), v.transpose(1, 2).unsqueeze(2)
    scores = (q @ k.transpose(-1, -2)) * size**-0.5
    shares = scores.float().masked_fill(places.unseen, -torch.inf).softmax(-1)
    return (shares.to(v.dtype) @ v).flatten(1, 2).transpose(1, 2).flatten(2)
