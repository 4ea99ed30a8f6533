"""KV tensors that start small and grow on demand, up to the pool's capacity.

The pool hands out the lowest free id, so the tensors only need to reach the highest id in use.
Knows the runner's resize; knows no sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_actor.model.runner_protocol import Runner
from engine_actor.work.memory_errors import is_out_of_memory


class KVGrowthError(MemoryError):
    """The device has no memory for the blocks that the pool has already promised."""


class ElasticKV:
    """`n_blocks` blocks exist now; `capacity` is the most that may exist.

    Growth doubles, so that its copies, where a layer cannot stay in its place, stay cheap in sum;
    where double is too much, exactly what is needed is tried before giving up. `settle` is called
    before the tensors change: it makes the device wait for what else touches them.
    """

    def __init__(
        self,
        runner: Runner,
        first: int,
        capacity: int,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._settle = settle
        self.capacity = capacity
        self.n_blocks = min(first, capacity)
        runner.reserve_kv(capacity)
        runner.resize_kv(self.n_blocks)

    def cover(self, n_blocks: int) -> None:
        """Make ids below n_blocks usable. Raises KVGrowthError where memory is out."""
        if n_blocks <= self.n_blocks:
            return
        self._settle()
        generous = max(n_blocks, min(2 * self.n_blocks, self.capacity))
        for target in dict.fromkeys((generous, n_blocks)):
            try:
                self._runner.resize_kv(target)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            else:
                self.n_blocks = target
                return
        raise KVGrowthError(f"no memory to grow the KV pool from {self.n_blocks} to {n_blocks}")

    def shrink(self, n_blocks: int) -> None:
        """Give the memory of ids n_blocks and above back; the caller knows that none is in use."""
        if n_blocks < self.n_blocks:
            self._settle()
            self._runner.resize_kv(n_blocks)
            self.n_blocks = n_blocks
