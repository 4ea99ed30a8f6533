"""A model without tensors: its next token is a hash of every token it finds in the KV cells.

So a block shared wrongly, reused too early or computed out of order shows at once: each position
read is compared with the token that belongs there, and what is sampled depends on all of them.
Copies of blocks to the host and back are made as late as a plan lets them be.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine_actor.core.block_copies import BlockCopy, CopyList, batches
from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import (
    Failure,
    PrefillChunk,
    SampledToken,
    StepOutcome,
    StepPlan,
)
from engine_actor.core.sequence import FinishReason, Key

POISON = -1
VOCABULARY = 11
EOS = 0


def next_token(tokens: Sequence[int]) -> int:
    """The token after `tokens`; it depends on every one of them and on their order."""
    return zlib.crc32(array("q", tokens).tobytes()) % VOCABULARY


def solo_run(prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
    """What a request must give alone and in any company: (output tokens, reason)."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        tokens.append(next_token(tokens))
        is_stop = tokens[-1] in sampling.stop_token_ids or (
            tokens[-1] == EOS and not sampling.ignore_eos
        )
        if is_stop and len(tokens) - len(prompt) > sampling.min_tokens:
            return tokens[len(prompt) :], FinishReason.STOP
    return tokens[len(prompt) :], FinishReason.LENGTH


@dataclass
class Fault:
    """What to do to one sequence's part of a step: "retry", "partial" (half of it is computed),
    "silent" (no word of it), "mute" (computed, but no token where one was due) or "fail".
    """

    kind: str
    reason: FinishReason = FinishReason.OOM
    code: str = "out_of_memory"


@dataclass
class _OpenStep:
    outcome: StepOutcome
    written: dict[int, Key] = field(default_factory=dict)
    read: dict[int, set[Key]] = field(default_factory=dict)


class PagedModel:
    """Runs a plan the moment it is launched; its outcome is joined later. `fault(key, n_tokens)` is
    asked for each part of a step.
    """

    def __init__(
        self, block_tokens: int, fault: Callable[[Key, int], Fault | None] | None = None
    ) -> None:
        self.block_tokens = block_tokens
        self.fault = fault
        self.computed_tokens = 0
        self._cells: dict[int, list[int]] = {}
        self._last_token: dict[int, int] = {}
        self._truth: dict[Key, list[int]] = {}
        self._open: list[_OpenStep] = []
        self._void: set[Key] = set()
        self._ranges: dict[Key, tuple[int, int, int]] = {}
        self._host: dict[int, list[int]] = {}
        self._copies: deque[CopyList] = deque()
        self.landed = 0

    @property
    def n_open(self) -> int:
        """Steps launched and not joined."""
        return len(self._open)

    def expect(self, key: Key, prompt: Sequence[int]) -> None:
        """Name the prompt of a request before its first step."""
        self._truth[key] = list(prompt)

    def truth(self, key: Key, n_tokens: int) -> list[int]:
        """The first n_tokens tokens that this request may ever have."""
        tokens = self._truth[key]
        while len(tokens) < n_tokens:
            tokens.append(next_token(tokens))
        return tokens[:n_tokens]

    def ask(self, copies: CopyList) -> None:
        """Queue copies behind all that was launched; make those that are to be first."""
        pending = [copy for asked in self._copies for copy in asked.copies]
        for copy in copies.first:
            assert copy.block not in {other.block for other in pending}, "an urgent copy overtakes"
            assert copy.slot not in {other.slot for other in pending}, "an urgent copy overtakes"
        self._make(copies.first)
        if copies.copies:
            self._copies.append(copies)

    def land(self, ticket: int) -> None:
        """Make the copies up to a ticket."""
        while self._copies and self._copies[0].ticket <= ticket:
            asked = self._copies.popleft()
            assert asked.ticket > self.landed, "copies out of order"
            self.landed = asked.ticket
            self._make(asked.copies)

    def _make(self, copies: Sequence[BlockCopy]) -> None:
        for part in batches(copies):
            for block, slot, to_host in reversed(part):
                if to_host:
                    self._host[slot] = list(self._cells[block])
                else:
                    self._cells[block] = list(self._host[slot])

    def launch(self, plan: StepPlan) -> None:
        """Run one step, decode before prefill."""
        self.ask(plan.copies)
        self.land(plan.waits_for)
        keys = [part.key for part in (*plan.decode, *plan.prefill)]
        assert len(set(keys)) == len(keys), "one sequence twice in a step"
        step = _OpenStep(StepOutcome(plan))
        self._void = {
            key for key in self._void if any(self._has(open_step, key) for open_step in self._open)
        }
        computed: list[tuple[Key, int]] = []
        sampled: list[SampledToken] = []
        failures: list[Failure] = []
        retry: list[Key] = []
        for slot in plan.decode:
            token = self._last_token[slot.slot] if slot.token is None else slot.token
            chunk = PrefillChunk(
                slot.key, slot.position, slot.position + 1, (token,), slot.blocks, True
            )
            chunks = [(chunk, slot.slot)]
            self._run(chunks, step, computed, sampled, failures, retry)
        chunks = [(chunk, chunk.slot) for chunk in plan.prefill]
        self._run(chunks, step, computed, sampled, failures, retry)
        step.outcome = StepOutcome(
            plan,
            computed=tuple(computed),
            sampled=tuple(sampled),
            failures=tuple(failures),
            retry=tuple(retry),
        )
        self._open.append(step)

    def join(self) -> StepOutcome:
        """The outcome of the oldest open step."""
        return self._open.pop(0).outcome

    def _run(
        self,
        chunks: list[tuple[PrefillChunk, int]],
        step: _OpenStep,
        computed: list[tuple[Key, int]],
        sampled: list[SampledToken],
        failures: list[Failure],
        retry: list[Key],
    ) -> None:
        for chunk, slot in chunks:
            key = chunk.key
            void = key in self._void
            fault = None if void or self.fault is None else self.fault(key, chunk.end - chunk.start)
            if fault is not None and fault.kind == "mute" and not chunk.samples:
                fault = None
            self._guard(chunk, step)
            if not self._follows(chunk, void, fault):
                if fault is None:
                    computed.append((key, chunk.start))
                else:
                    self._broken(key, slot, fault, failures)
                continue
            end = chunk.end
            if fault is not None and fault.kind == "partial":
                end = (chunk.start + chunk.end) // 2
            token = self._compute(chunk, end, void, broken=fault is not None)
            if fault is not None:
                self._broken(key, slot, fault, failures)
                if fault.kind == "retry":
                    retry.append(key)
                elif fault.kind in ("partial", "mute"):
                    computed.append((key, end))
                continue
            computed.append((key, end))
            if chunk.samples:
                self._last_token[slot] = token
                sampled.append(SampledToken(key, token))

    def _broken(self, key: Key, slot: int, fault: Fault, failures: list[Failure]) -> None:
        """What was launched behind this part of a step means nothing."""
        self._void.add(key)
        self._last_token[slot] = POISON
        if fault.kind == "fail":
            failures.append(Failure(key, fault.reason, fault.code))

    def _follows(self, chunk: PrefillChunk, void: bool, fault: Fault | None) -> bool:
        """Check that a range of layers goes on where the one before it ended; its cells hold
        nothing yet. True where the chunk is computed with it.
        """
        layers = chunk.layers
        if layers is None:
            self._ranges.pop(chunk.key, None)
            return True
        if not void:
            assert 0 <= layers.first < layers.last <= layers.of, f"{chunk.key}: {layers}"
            before = (chunk.start, chunk.end, layers.first)
            assert layers.first == 0 or self._ranges.get(chunk.key) == before, f"{chunk.key}: a gap"
            assert chunk.ends or not chunk.samples, f"{chunk.key} samples half way"
        self._ranges[chunk.key] = (chunk.start, chunk.end, layers.last)
        if chunk.ends and (fault is None or fault.kind not in ("partial", "mute")):
            return True
        for position in range(chunk.start, chunk.end):
            self._write(chunk.blocks, position, POISON)
        return False

    def _compute(self, chunk: PrefillChunk, end: int, void: bool, broken: bool) -> int:
        """Write the KV of a chunk up to `end`, poison beyond; returns the sampled token."""
        assert 0 <= chunk.start < chunk.end, f"{chunk.key}: an empty chunk"
        assert len(chunk.blocks) * self.block_tokens >= chunk.end, f"{chunk.key}: no block"
        if void:
            for position in range(chunk.start, chunk.end):
                self._write(chunk.blocks, position, POISON)
            return POISON
        truth = self.truth(chunk.key, chunk.end)
        assert list(chunk.tokens) == truth[chunk.start :], f"{chunk.key}: wrong tokens"
        seen = [self._read(chunk.blocks, position) for position in range(chunk.start)]
        assert seen == truth[: chunk.start], f"{chunk.key}: wrong KV below {chunk.start}"
        for position in range(chunk.start, chunk.end):
            self._write(chunk.blocks, position, POISON if position >= end else truth[position])
        if broken and end == chunk.end:
            # A work that failed may have written anything where it was to write.
            self._write(chunk.blocks, chunk.start, POISON)
            return POISON
        self.computed_tokens += end - chunk.start
        return next_token([*seen, *chunk.tokens])

    def _guard(self, chunk: PrefillChunk, step: _OpenStep) -> None:
        """No block that an open work of another sequence touches may be written (B-10), none that a
        copy may still touch may be used.
        """
        pending = {copy.block for asked in self._copies for copy in asked.copies}
        assert not pending & set(chunk.blocks), f"{chunk.key}: a copy is under way"
        first = chunk.start // self.block_tokens
        for index, block in enumerate(chunk.blocks):
            writes = index >= first
            for open_step in (*self._open, step):
                writer = open_step.written.get(block, chunk.key)
                assert writer == chunk.key, f"block {block}: {writer} still writes it"
                if writes:
                    readers = open_step.read.get(block, set()) - {chunk.key}
                    assert not readers, f"block {block}: {readers} still read it"
            step.read.setdefault(block, set()).add(chunk.key)
            if writes:
                step.written[block] = chunk.key

    def _has(self, step: _OpenStep, key: Key) -> bool:
        plan = step.outcome.plan
        return any(part.key == key for part in (*plan.decode, *plan.prefill))

    def _read(self, blocks: Sequence[int], position: int) -> int:
        cells = self._cells.get(blocks[position // self.block_tokens])
        return POISON if cells is None else cells[position % self.block_tokens]

    def _write(self, blocks: Sequence[int], position: int, token: int) -> None:
        block = blocks[position // self.block_tokens]
        cells = self._cells.setdefault(block, [POISON] * self.block_tokens)
        cells[position % self.block_tokens] = token
