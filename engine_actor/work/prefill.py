"""PrefillWork: chunks of one or more prompts in one forward pass, whole or in ranges of layers.

Knows chunks; does not know why these were chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace

import torch

from engine_actor.core.plan import PrefillChunk, TokenLogprobs
from engine_actor.core.sequence import Key
from engine_actor.model.sampler import token_logprobs
from engine_actor.work.base import Lane, Sampled, Work, WorkResult, WorkState, WorkStateError
from engine_actor.work.inputs import BatchInputs, build_prefill

HEAD_ROWS = 256
"""Rows of the head at once for prompt logprobs: 256 rows of a 128k vocabulary are 128 MiB."""


@dataclass(eq=False)
class PrefillWork(Work):
    """Only the last row of a chunk that samples reaches the head at launch; prompt logprobs go
    through it at finish, HEAD_ROWS rows at a time, each slice reduced before the next."""

    chunks: tuple[PrefillChunk, ...] = ()
    hidden: torch.Tensor | None = field(default=None, init=False)
    next_layer: int = field(default=0, init=False)

    kind = "prefill"

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(chunk.key for chunk in self.chunks)

    @property
    def rows(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def blocks_needed(self) -> int:
        return sum(len(chunk.blocks) for chunk in self.chunks)

    @property
    def sampled(self) -> tuple[Sampled, ...]:
        return tuple(Sampled(c.key, c.end, c.slot) for c in self.chunks if c.samples)

    @property
    def computed(self) -> tuple[tuple[Key, int], ...]:
        """Up to which position each sequence has KV once this is done."""
        return tuple((chunk.key, chunk.end) for chunk in self.chunks)

    def halves(self) -> tuple[PrefillWork, ...]:
        """Split by chunks; a single chunk is shortened by `part` instead."""
        if len(self.chunks) < 2:
            return ()
        middle = len(self.chunks) // 2
        return tuple(
            replace(self, chunks=part) for part in (self.chunks[:middle], self.chunks[middle:])
        )

    def without(self, keys: Set[Key]) -> PrefillWork | None:
        left = tuple(chunk for chunk in self.chunks if chunk.key not in keys)
        if len(left) == len(self.chunks):
            return self
        return replace(self, chunks=left) if left else None

    def part(self, start: int, end: int) -> PrefillWork:
        """Positions start..end-1 of the only chunk, as a NEW work."""
        (chunk,) = self.chunks
        piece = replace(
            chunk,
            start=start,
            end=end,
            tokens=chunk.tokens[start - chunk.start : end - chunk.start],
            blocks=chunk.blocks[: -(-end // self.context.block_tokens)],
            samples=chunk.samples and end == chunk.end,
        )
        return replace(self, chunks=(piece,))

    def launch_layers(self, lane: Lane, first: int, last: int) -> None:
        """Run layers first..last-1; the work is LAUNCHED once the last layer has run. The ranges
        must follow each other from 0. Raises WorkStateError."""
        self._require("launch_layers", WorkState.PREPARED)
        n_layers = self.context.runner.n_layers
        if first != self.next_layer or not first < last <= n_layers:
            raise WorkStateError(
                f"prefill work {self.number}: layers {first}..{last} where {self.next_layer} "
                f"of {n_layers} is next"
            )
        if first == 0:
            self._hook("launch")
        with lane.entered():
            if self.timer is None:
                self.timer = lane.new_timer()
                self.timer.start()
            self._run(first, last)
            self.timer.stop()
        if last == n_layers:
            self.state = WorkState.LAUNCHED

    def _build(self) -> BatchInputs:
        context = self.context
        return build_prefill(self.chunks, context.block_tokens, context.runner.device, context.feed)

    def _forward(self) -> None:
        if self.next_layer:
            raise WorkStateError(f"prefill work {self.number}: launch after launch_layers")
        self._run(0, self.context.runner.n_layers)

    def _run(self, first: int, last: int) -> None:
        runner, inputs = self.context.runner, self._prepared_inputs()
        hidden = runner.embed(inputs) if self.hidden is None else self.hidden
        self.hidden = runner.run_layers(hidden, inputs, first, last)
        self.next_layer = last
        if last == runner.n_layers:
            if len(inputs.logit_rows):
                self.logits = runner.logits(self.hidden, inputs.logit_rows)
            if not self.scores_prompts:
                self.hidden = None

    def _report(self) -> WorkResult:
        return WorkResult(
            computed=self.computed,
            sampled=self._tokens(),
            prompt_logprobs=tuple(self.prompt_logprobs()),
        )

    @property
    def scores_prompts(self) -> bool:
        """True where finish() reads the hidden states of the whole work."""
        return any(chunk.prompt_logprobs is not None for chunk in self.chunks)

    def prompt_logprobs(self) -> Iterator[tuple[Key, int, tuple[TokenLogprobs, ...]]]:
        """(key, first prompt position, entries): the row of position p scores the token at p+1."""
        offset = 0
        for chunk in self.chunks:
            request = self.context.request(chunk.key)
            if chunk.prompt_logprobs is not None and request is not None:
                count = min(chunk.end, request.n_prompt - 1) - chunk.start
                if count > 0:
                    targets = request.tokens[chunk.start + 1 : chunk.start + 1 + count]
                    entries = self._scores(offset, targets, chunk.prompt_logprobs)
                    yield chunk.key, chunk.start + 1, entries
            offset += chunk.end - chunk.start

    def _scores(self, offset: int, targets: list[int], top: int) -> tuple[TokenLogprobs, ...]:
        if self.hidden is None:
            raise WorkStateError(f"prefill work {self.number}: no hidden state for logprobs")
        device = self.hidden.device
        entries: list[TokenLogprobs] = []
        for begin in range(0, len(targets), HEAD_ROWS):
            wanted = torch.tensor(targets[begin : begin + HEAD_ROWS], device=device)
            rows = torch.arange(len(wanted), device=device) + (offset + begin)
            logits = self.context.runner.logits(self.hidden, rows)
            entries.extend(token_logprobs(logits, wanted, top))
        return tuple(entries)

    def _blocks_end(self) -> int:
        return 1 + max(max(chunk.blocks) for chunk in self.chunks)

    def _release(self) -> None:
        super()._release()
        self.hidden = None
