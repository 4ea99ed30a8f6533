"""A step while it is being planned: what it computes, whom it preempted, whom it refused.

Knows how a sequence becomes a chunk or a slot; decides nothing.
"""

from __future__ import annotations

from engine_actor.core.block_copies import CopyList
from engine_actor.core.commit import Flight, Launch
from engine_actor.core.overlap_policy import Sharing
from engine_actor.core.plan import DecodeSlot, LayerRange, PrefillChunk, Refusal, StepPlan
from engine_actor.core.roster import Roster
from engine_actor.core.sequence import BlockTable, FinishReason, Key, Sequence


class StepDraft:
    """Collects one step. Adding a sequence marks it as in flight."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._decode: list[DecodeSlot] = []
        self._prefill: list[PrefillChunk] = []
        self._launches: list[Launch] = []
        self._preempted: list[Key] = []
        self._refused: list[Refusal] = []
        self._waits_for = 0
        self.short_of_blocks = False
        """A running sequence waits for blocks: nobody new may start in this step."""

    @property
    def n_decoding(self) -> int:
        """Decode slots so far."""
        return len(self._decode)

    @property
    def longest_context(self) -> int:
        """Positions of the longest sequence that decodes; 0 without one."""
        return max((slot.position + 1 for slot in self._decode), default=0)

    def preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the queue."""
        self._roster.preempt(seq)
        self._preempted.append(seq.key)
        self.short_of_blocks = True

    def refuse(self, seq: Sequence, code: str, needed: int = 0, free: int = 0) -> None:
        """End a sequence that the scheduler itself gives up."""
        reason = FinishReason.OOM if code == "out_of_memory" else FinishReason.ERROR
        self._roster.finish(seq, reason, code)
        self._refused.append(Refusal(seq.key, reason, code, needed, free))

    def add_slot(self, seq: Sequence) -> None:
        """Compute the next position of a decoding sequence and sample the token after it."""
        position = seq.n_scheduled
        token = seq.tokens[position] if position < len(seq.tokens) else None
        blocks = seq.frozen_blocks
        if blocks is None:
            blocks = seq.frozen_blocks = BlockTable(seq.blocks)
        self._decode.append(DecodeSlot(seq.key, position, token, blocks, seq.slot))
        self._launch(seq, position + 1, samples=True, scores_prompt=False)

    def add_chunk(
        self, seq: Sequence, n_tokens: int, block_tokens: int, layers: LayerRange | None = None
    ) -> None:
        """Compute the next n_tokens of a prompt (or of a preempted sequence's known tokens), or
        some layers of them; the ranges of a chunk follow each other from 0.
        """
        start = seq.n_scheduled
        end = start + n_tokens
        ends = layers is None or layers.last == layers.of
        samples = ends and end == len(seq.tokens) and seq.sampling.max_tokens > 0
        wanted = seq.sampling.prompt_logprobs
        if not ends or not seq.n_prompt_scored <= start < seq.n_prompt - 1:
            wanted = None
        self._prefill.append(
            PrefillChunk(
                key=seq.key,
                start=start,
                end=end,
                tokens=tuple(seq.tokens[start:end]),
                blocks=tuple(seq.blocks[: -(-end // block_tokens)]),
                samples=samples,
                prompt_logprobs=wanted,
                slot=seq.slot,
                layers=layers,
            )
        )
        seq.range_end, seq.next_layer = (0, 0) if ends or layers is None else (end, layers.last)
        self._launch(seq, end if ends else start, samples, wanted is not None, layers is not None)

    def plan(self, step: int, sharing: Sharing, copies: CopyList) -> StepPlan:
        """The finished plan, with the copies that its making has asked for."""
        return StepPlan(
            step=step,
            mode=sharing.mode,
            max_ctas=sharing.max_ctas,
            prefill=tuple(self._prefill),
            decode=tuple(self._decode),
            preempted=tuple(self._preempted),
            refused=tuple(self._refused),
            copies=copies,
            waits_for=self._waits_for,
        )

    def flight(self, step: int) -> Flight:
        """The scheduler's own record of the launched step."""
        return Flight(step, self._launches)

    def _launch(
        self, seq: Sequence, end: int, samples: bool, scores_prompt: bool, is_range: bool = False
    ) -> None:
        seq.n_scheduled = end
        seq.in_flight += 1
        self._waits_for = max(self._waits_for, seq.copy_ticket)
        self._launches.append(Launch(seq, end, samples, scores_prompt, is_range=is_range))


def chunk_wanted(seq: Sequence) -> int:
    """Tokens that the next chunk of a prefill may have at most.

    Rows whose prompt logprobs are reported already (before a preemption) stay in chunks of their
    own: they are computed again, but not reported again.
    """
    start, end = seq.n_scheduled, len(seq.tokens)
    if start < seq.n_prompt_scored:
        end = min(end, seq.n_prompt_scored)
    return end - start
