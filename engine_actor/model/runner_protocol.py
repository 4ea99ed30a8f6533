"""What a work needs of a model. `model.forward.ModelRunner` is the real one; tests write theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine_actor.core.block_copies import BlockCopy
from engine_actor.model.batch_inputs import BatchInputs


@dataclass(slots=True)
class GraphCounts:
    """What /v1/status tells, of decode steps the metrics too. reason: why nothing is captured, None
    where it is. eager: passes in a bucket without a graph (its first, or after a failed capture).
    unbucketed: passes that fit no bucket. dropped: graphs given up because the cache moved.
    """

    reason: str | None = None
    graphs: int = 0
    replays: int = 0
    eager: int = 0
    unbucketed: int = 0
    failures: int = 0
    dropped: int = 0
    nbytes: int = 0


class BlockStore(Protocol):
    """Slots on the host for blocks of a runner's KV."""

    nbytes: int
    reason: str | None
    """Why the copies are made one by one; None where one launch makes them."""

    def copy(self, part: Sequence[BlockCopy]) -> None:
        """Put copies that go one way, no block and no slot twice, on the current stream."""
        ...


class Runner(Protocol):
    """A causal model over paged KV. Every method runs on the caller's current stream and device.

    Raises torch.OutOfMemoryError (or MemoryError on the CPU) where memory is out; a call is
    idempotent on KV: run again with the same inputs it writes the same bytes.
    """

    n_layers: int
    vocab_size: int
    """Ids at and above this are padding of the embedding and never leave the head."""
    device: torch.device

    def embed(self, inputs: BatchInputs) -> torch.Tensor:
        """Hidden states [T, hidden] before layer 0."""
        ...

    def run_layers(
        self, hidden: torch.Tensor, inputs: BatchInputs, first: int, last: int
    ) -> torch.Tensor:
        """Apply layers first..last-1, writing their KV. Returns the new [T, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, vocab_size] of the given rows of hidden."""
        ...

    def last_logits(
        self, hidden: torch.Tensor, inputs: BatchInputs, first: int
    ) -> torch.Tensor | None:
        """Apply layers first..n_layers-1, writing their KV: fp32 logits [R, vocab_size] of
        inputs.logit_rows, None where that names no row. What run_layers() and logits() give.
        """
        ...

    def prefill_logits(self, inputs: BatchInputs) -> torch.Tensor | None:
        """The whole forward of a batch of prompts: as embed() and last_logits().

        On a GPU the next call may write its logits over these, as with decode_logits().
        """
        ...

    def decode_logits(self, inputs: BatchInputs) -> torch.Tensor:
        """The whole forward of a decode batch: fp32 logits [B, vocab_size], a row a sequence.

        On a GPU the next call may write its logits over these: whoever reads them does so before
        that, in stream order.
        """
        ...

    @property
    def graph_counts(self) -> GraphCounts:
        """Of the decode steps so far."""
        ...

    @property
    def prefill_graph_counts(self) -> GraphCounts:
        """Of the batches of prompts so far."""
        ...

    def warm_thread(self, most_rows: int) -> None:
        """Prepare what the calling thread needs for itself to run chunks of up to most_rows rows
        without a delay; to be called by the one thread that steps.
        """
        ...

    def reserve_kv(self, capacity: int) -> None:
        """Called before the first resize_kv of a pool that will have at most `capacity` blocks;
        what the cache held may be gone.
        """
        ...

    def resize_kv(self, n_blocks: int) -> None:
        """Grow or shrink the KV tensors to n_blocks; the blocks that stay keep their content."""
        ...

    def kv_checksum(self, blocks: tuple[int, ...]) -> int:
        """A checksum of the named blocks' bytes, for the tests of idempotent retry."""
        ...

    def host_blocks(self, n_slots: int) -> BlockStore:
        """Memory of the host for n_slots blocks. Raises CheckpointError where it cannot be had."""
        ...
