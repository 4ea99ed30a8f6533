"""Who is where: waiting, running, leaving; and the one rule by which blocks come back.

Knows no plan and no budget. A sequence that stops running keeps its blocks and its slot until the
last work that may touch them is joined; only settle() gives them back.
"""

from __future__ import annotations

from engine_actor.core.kv_manager import KVManager
from engine_actor.core.queue import RankedSequences
from engine_actor.core.sequence import FinishReason, Key, SeqState, Sequence


class Roster:
    """All sequences the scheduler knows, and their moves between states."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self.waiting = RankedSequences()
        self.running = RankedSequences()
        self.live: dict[Key, Sequence] = {}
        self.leaving: set[Sequence] = set()
        """Waiting or done, but with works in flight: their blocks come back later."""
        self.preemptions = 0
        self._free_slots: list[int] = []
        self._n_slots = 0
        self._turns = 0

    def add(self, seq: Sequence) -> None:
        """Take in a new sequence. Raises ValueError on a key that is in use."""
        if seq.key in self.live:
            raise ValueError(f"{seq.key} is in use")
        self.live[seq.key] = seq
        self.waiting.add(seq)

    def start(self, seq: Sequence, now: float) -> None:
        """WAITING -> PREFILL; its blocks are attached already."""
        self.waiting.remove(seq)
        seq.move(SeqState.PREFILL)
        self.running.add(seq)
        seq.slot = self._take_slot()
        self.take_turn(seq)
        if seq.admitted_at is None:
            seq.admitted_at = now

    def take_turn(self, seq: Sequence) -> None:
        """Go to the end of the round of prefills."""
        self._turns += 1
        seq.turn = self._turns

    def preempt(self, seq: Sequence) -> None:
        """Back to the queue, at its old rank; all its KV is computed again later."""
        self.running.remove(seq)
        seq.move(SeqState.WAITING)
        seq.n_preempted += 1
        seq.next_layer = 0
        seq.in_crowd = False
        self.preemptions += 1
        self.waiting.add(seq)
        self.settle(seq)

    def finish(self, seq: Sequence, reason: FinishReason, code: str | None = None) -> None:
        """Any live state -> DONE."""
        (self.waiting if seq.state is SeqState.WAITING else self.running).remove(seq)
        seq.move(SeqState.DONE)
        seq.finish, seq.finish_code = reason, code
        del self.live[seq.key]
        self.settle(seq)

    def settle(self, seq: Sequence) -> None:
        """Give back blocks and slot of a sequence that does not run, once nothing is in flight."""
        if seq.state is SeqState.PREFILL or seq.state is SeqState.DECODE:
            return
        if seq.in_flight:
            self.leaving.add(seq)
            return
        self.leaving.discard(seq)
        self._kv.release(seq)
        if seq.slot >= 0:
            self._free_slots.append(seq.slot)
            seq.slot = -1

    def holders(self) -> list[Sequence]:
        """Every sequence that may have blocks."""
        return [*self.running, *self.leaving]

    def check(self) -> None:
        """Raise AssertionError where states, lists, slots and blocks disagree."""
        assert set(self.live.values()) == {*self.waiting, *self.running}, "a live sequence is lost"
        for seq in self.waiting:
            assert seq.state is SeqState.WAITING, f"{seq.key} waits as {seq.state}"
            assert seq in self.leaving or (not seq.blocks and seq.slot < 0), f"{seq.key} leaks"
        for seq in self.running:
            assert seq.state in (SeqState.PREFILL, SeqState.DECODE), f"{seq.key} runs"
            assert seq.n_scheduled >= seq.n_computed, f"{seq.key} computed what nobody planned"
        for seq in self.leaving:
            assert seq.state in (SeqState.WAITING, SeqState.DONE), f"{seq.key} leaves"
            assert seq.in_flight > 0, f"{seq.key} should have left"
        used = [seq.slot for seq in self.holders()]
        assert sorted(used + self._free_slots) == list(range(self._n_slots)), "a slot is lost"
        self._kv.check(self.holders())

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._n_slots += 1
        return self._n_slots - 1
