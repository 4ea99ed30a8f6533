"""The KV pool's promise beside what the device really has: cut where memory ran out, tried again
once everybody has ended, tensors given back after a shrink; which copies of blocks are done.

Knows blocks and the scheduler's pool; knows no request.
"""

from __future__ import annotations

from engine_actor.core.kv_manager import KVManager
from engine_actor.core.scheduler import Scheduler
from engine_actor.work.elastic import ElasticKV
from engine_actor.work.host_copies import Copies


class Pool:
    """`n_blocks`: what the plan promises."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVManager,
        elastic: ElasticKV,
        n_blocks: int,
        copies: Copies,
    ) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._elastic = elastic
        self._n_blocks = n_blocks
        self._copies = copies
        self._is_cut = False

    def refresh(self) -> None:
        """Tell the KV manager what the device has and has done, before a step is planned."""
        self._kv.in_memory = self._elastic.n_blocks
        self._kv.copies.landed = self._copies.landed

    def cut(self) -> int:
        """Promise only what exists; returns how many blocks that are."""
        self._is_cut = True
        self._scheduler.resize(max(1, self._elastic.n_blocks))
        return self._elastic.n_blocks

    def fit(self) -> None:
        """After a shrink of the pool: give memory back once nobody uses the tail."""
        if self._elastic.n_blocks > self._kv.capacity and self._kv.extent <= self._kv.capacity:
            self._elastic.shrink(self._kv.capacity)
        self.restore()

    def restore(self) -> None:
        """Once nobody is left here, whoever took the memory may be gone: let the next ones try."""
        if self._is_cut and not self._scheduler.has_work:
            self._is_cut = False
            self._scheduler.resize(self._n_blocks)
