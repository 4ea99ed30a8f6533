"""PrefillWork: chunks of one or more prompts in one forward pass, or some layers of a single chunk.

Knows chunks; does not know why these were chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace

import torch

from engine_actor.core.plan import LayerRange, PrefillChunk, TokenLogprobs
from engine_actor.core.sequence import Key
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.sampler import token_logprobs
from engine_actor.work.base import Sampled, Work, WorkResult, WorkStateError
from engine_actor.work.inputs import build_prefill

HEAD_ROWS = 256
"""Rows of the head at once for prompt logprobs: 256 rows of a 128k vocabulary are 128 MiB."""


@dataclass(slots=True)
class OpenChunk:
    """A chunk that is half way through the layers, from one step to the next."""

    inputs: BatchInputs | None = None
    hidden: torch.Tensor | None = None
    next_layer: int = 0
    key: Key | None = None

    def close(self) -> None:
        """Drop the tensors: what was computed is of no use any more."""
        self.inputs = self.hidden = self.key = None
        self.next_layer = 0


class RangeLost(RuntimeError):
    """The layers before these were never run, or failed; the chunk has to begin again."""


@dataclass(eq=False)
class PrefillWork(Work):
    """A chunk with a range of layers is the only one of its work; `open_chunk` holds what the range
    before it left. Such a work is never tried again by itself.

    Only the last row of a chunk that samples reaches the head at launch; prompt logprobs go
    through it at finish, HEAD_ROWS rows at a time, each slice reduced before the next."""

    chunks: tuple[PrefillChunk, ...] = ()
    open_chunk: OpenChunk = field(default_factory=OpenChunk)
    hidden: torch.Tensor | None = field(default=None, init=False)

    kind = "prefill"

    @property
    def layers(self) -> LayerRange | None:
        """The range of its only chunk; None for whole forward passes."""
        return self.chunks[0].layers if len(self.chunks) == 1 else None

    @property
    def can_be_retried(self) -> bool:
        return self.layers is None

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
        return tuple((chunk.key, chunk.end if chunk.ends else chunk.start) for chunk in self.chunks)

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

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        if self.layers is not None:
            self.open_chunk.close()

    def _build(self) -> BatchInputs:
        layers, context, before = self.layers, self.context, self.open_chunk
        if layers is not None and layers.first:
            if before.inputs is None or (before.key, before.next_layer) != (
                self.chunks[0].key,
                layers.first,
            ):
                raise RangeLost(f"{self.chunks[0].key}: nothing is left of the layers before")
            return before.inputs
        chunks = self.chunks
        if layers is not None:
            # The last range reads these inputs too, and whether it samples is known there.
            chunks = tuple(replace(chunk, samples=True) for chunk in chunks)
        return build_prefill(chunks, context.block_tokens, context.runner.device, context.feed)

    def _forward(self) -> None:
        runner, inputs, layers = self.context.runner, self._prepared_inputs(), self.layers
        if layers is None:
            if self.scores_prompts:
                self._end(runner.embed(inputs), 0)
            else:
                self._keep(runner.prefill_logits(inputs))
            return
        before = self.open_chunk
        hidden = before.hidden if layers.first else runner.embed(inputs)
        if hidden is None:
            raise RangeLost(f"{self.chunks[0].key}: nothing is left of the layers before")
        if layers.last == layers.of:
            before.close()
            self._end(hidden, layers.first)
            return
        hidden = runner.run_layers(hidden, inputs, layers.first, layers.last)
        before.inputs, before.hidden = inputs, hidden
        before.key, before.next_layer = self.chunks[0].key, layers.last

    def _end(self, hidden: torch.Tensor, first: int) -> None:
        """Layers first.. and the head, for the rows that sample."""
        runner, inputs = self.context.runner, self._prepared_inputs()
        if self.scores_prompts:
            self.hidden = runner.run_layers(hidden, inputs, first, runner.n_layers)
            if self.sampled:
                self.logits = runner.logits(self.hidden, inputs.logit_rows)
            return
        self._keep(runner.last_logits(hidden, inputs, first))

    def _keep(self, logits: torch.Tensor | None) -> None:
        """A range's inputs name rows before it is known whether they are sampled."""
        if self.sampled:
            self.logits = logits

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
