"""Random lives of sequences with a second tier on the host: what comes back is what went, and
copies that are as late as their tickets let them be do no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine_actor.core.block_copies import BlockCopy, CopyList, batches
from engine_actor.core.kv_manager import KVManager
from engine_actor.core.sequence import Sequence as Request
from tests.core.test_kv_machine import BLOCK, LARGEST, KVMachine, weak_digest


class TieredKVMachine(KVMachine):
    """The same lives with a few slots on the host. A copy is made when somebody needs the block,
    not before; what the host has heard of is less than that.
    """

    n_slots = 5

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(LARGEST, BLOCK, host_slots=self.n_slots, digest=self.digest)
        self.host: dict[int, list[object]] = {}
        self.asked: deque[CopyList] = deque()
        self.made = 0

    @rule(seq=KVMachine.sequences)
    def land(self, seq: Request) -> None:
        self._take()
        self.kv.copies.landed = self.made

    @rule(n_blocks=st.sampled_from([0, 2, 32]))
    def hurry(self, n_blocks: int) -> None:
        self.kv.copies.few = n_blocks

    @rule(n_blocks=st.integers(1, LARGEST))
    def have_memory(self, n_blocks: int) -> None:
        self.kv.in_memory = n_blocks

    @rule(seq=KVMachine.sequences, n_tokens=st.integers(1, 5))
    def compute(self, seq: Request, n_tokens: int) -> None:
        self._make(seq.copy_ticket)
        super().compute(seq, n_tokens)

    def _read(self, seq: Request, position: int) -> object:
        self._make(seq.copy_ticket)
        return super()._read(seq, position)

    def _take(self) -> None:
        asked = self.kv.copies.take()
        self._run(asked.first)
        if asked.copies:
            self.asked.append(asked)

    def _make(self, ticket: int) -> None:
        self._take()
        while self.asked and self.asked[0].ticket <= ticket:
            asked = self.asked.popleft()
            self.made = asked.ticket
            self._run(asked.copies)

    def _run(self, copies: Sequence[BlockCopy]) -> None:
        for part in batches(copies):
            for block, slot, to_host in reversed(part):
                if to_host:
                    self.host[slot] = list(self.cells[block])
                else:
                    self.cells[block] = list(self.host[slot])


class CollidingTieredKVMachine(TieredKVMachine):
    """The same with a digest that collides all the time."""

    digest = staticmethod(weak_digest)
    n_slots = 3


TestTieredKVMachine = TieredKVMachine.TestCase
TestTieredKVMachine.settings = settings(max_examples=60, stateful_step_count=40)
TestCollidingTieredKVMachine = CollidingTieredKVMachine.TestCase
TestCollidingTieredKVMachine.settings = settings(max_examples=60, stateful_step_count=40)
