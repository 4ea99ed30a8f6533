"""The attention half of a decoder layer: project, rotate, store, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_actor import ops
from engine_actor.model.config import ModelConfig
from engine_actor.model.layer_ops import AttentionFn, LayerCache
from engine_actor.model.layers.linear import Projection


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What all layers of one forward share. `attend_heads` takes projected heads to attention in
    one kernel. Where there is none, `store` puts them into the cache in one, else `rotate` and
    `write` do; then comes `attend`.
    """

    rotate: ops.RowFn | None
    write: ops.WritePlan | None
    attend: ops.AttentionPlan
    store: ops.StoreFn | None = None
    attend_heads: ops.HeadsFn | None = None


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows of a forward that somebody reads. index: [R], of x. attend: of these queries."""

    index: torch.Tensor
    attend: ops.AttentionPlan


class Attention:
    """x [T, hidden], normed -> what is to be added to the residual, [T, hidden]."""

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionFn,
        qkv: Projection,
        o: Projection,
        q_norm: ops.RowFn | None = None,
        k_norm: ops.RowFn | None = None,
        head_norms: ops.HeadNorms | None = None,
    ) -> None:
        self._attention = attention
        self.qkv = qkv
        self.o = o
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._head_norms = head_norms
        self._heads = config.n_heads
        self._rotated = config.n_heads + config.n_kv_heads
        self._shape = (self._rotated + config.n_kv_heads, config.head_dim)

    def __call__(self, x: torch.Tensor, kv: LayerCache, step: StepTensors) -> torch.Tensor:
        return self.o(self.attend(self.qkv(x), kv, step))

    def of_rows(
        self, x: torch.Tensor, kv: LayerCache, step: StepTensors, wanted: WantedRows
    ) -> torch.Tensor:
        """The same of the wanted rows alone, [R, hidden]; all of x is put into the cache."""
        q = self.store(x, kv, step).index_select(0, wanted.index)
        return self.o(self._attention(q, kv, wanted.attend))

    def store(self, x: torch.Tensor, kv: LayerCache, step: StepTensors) -> torch.Tensor:
        """Put the keys and values of x into the cache; the queries [T, heads, head_dim], scaled."""
        return self._store(self.qkv(x).view(-1, *self._shape), kv, step)

    def attend(self, projected: torch.Tensor, kv: LayerCache, step: StepTensors) -> torch.Tensor:
        """What lies between the projections: qkv's y -> o's x."""
        heads = projected.view(-1, *self._shape)
        if step.attend_heads is not None:
            return step.attend_heads(heads, kv, self._head_norms)
        return self._attention(self._store(heads, kv, step), kv, step.attend)

    def _store(self, heads: torch.Tensor, kv: LayerCache, step: StepTensors) -> torch.Tensor:
        if step.store is not None:
            return step.store(heads, kv, self._head_norms)
        if self._q_norm is not None and self._k_norm is not None:
            q = self._q_norm(heads[:, : self._heads])
            k = self._k_norm(heads[:, self._heads : self._rotated])
            heads = torch.cat((q, k, heads[:, self._rotated :]), dim=1)
        assert step.rotate is not None
        assert step.write is not None
        heads = step.rotate(heads)
        ops.write_kv(kv, heads[:, self._heads :], step.write)
        return heads[:, : self._heads].to(kv.dtype)
