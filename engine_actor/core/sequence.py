"""One request on its way through the engine: the only mutable request object.

Changed only by the scheduler and by a work's finish(). No tensors, no text.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_actor.core.params import SamplingParams


class SeqState(enum.Enum):
    """Where a sequence stands. WAITING has no blocks; DONE is final."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class FinishReason(enum.Enum):
    """Why a sequence ended. Every accepted request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    OOM = "oom"
    ERROR = "error"


_LEGAL = {
    SeqState.WAITING: {SeqState.PREFILL, SeqState.DONE},
    SeqState.PREFILL: {SeqState.DECODE, SeqState.WAITING, SeqState.DONE},
    SeqState.DECODE: {SeqState.WAITING, SeqState.DONE},
    SeqState.DONE: set(),
}

Key = tuple[str, int]
"""(client, rid): a rid is unique only within its client and epoch."""


class IllegalTransition(RuntimeError):
    """A bug of ours: a sequence was moved along an edge that does not exist."""


class BlockTable(tuple[int, ...]):
    """Block ids of a sequence in order. `packed`: the same as i32 bytes; `end`: one more than the
    highest. Made once for each new block, so that a step copies a long context's ids in one piece.
    """

    packed: bytes
    end: int

    def __new__(cls, blocks: Iterable[int]) -> BlockTable:
        table = super().__new__(cls, blocks)
        table.packed = array("i", table).tobytes()
        table.end = 1 + max(table, default=-1)
        return table


def blocks_end(blocks: tuple[int, ...]) -> int:
    """One more than the highest id."""
    return blocks.end if isinstance(blocks, BlockTable) else 1 + max(blocks, default=-1)


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one accepted request. Equal only to itself: two requests may hold the same values.

    tokens: prompt ids, then every accepted output id. `n_prompt` never changes, so after a
    preemption the recomputed prefix is simply `tokens`.
    n_computed: positions whose KV is written and joined. n_scheduled: positions given to a plan;
    `n_scheduled >= n_computed`, and they differ only while works are in flight (pipeline depth 1).
    blocks: KV block ids in order; position p lives in blocks[p // block_tokens].
    deadline: absolute engine-clock seconds or None.

    The rest is the scheduler's and the KV manager's own:
    rank: the fixed order of service (queue.py). turn: place in the round of prefills.
    slot: row of the device's last-token buffer, -1 without one.
    block_hashes: chained digest of every full block of `tokens` hashed so far; tokens are only ever
    appended, so it stays valid over preemptions. n_registered: leading blocks that were offered to
    the prefix cache. frozen_blocks: BlockTable(blocks), kept until blocks change.
    n_prompt_scored: prompt rows whose logprobs are committed, so that a preempted request does not
    report them twice.
    copy_ticket: of the last copy that may still touch one of its blocks (block_copies.py); no work
    of it starts before that has landed. 0 where none does.
    range_end, next_layer: a chunk n_scheduled..range_end-1 that is planned up to next_layer; 0
    where none is open. whole_chunks: a range failed, so chunks are run whole from now on.
    in_crowd: it waited in a crowd of prompts, which is served to its end.
    """

    key: Key
    tokens: list[int]
    sampling: SamplingParams
    n_prompt: int
    arrived: float
    priority: int = 0
    deadline: float | None = None
    salt: str = ""
    trace_id: str = ""
    state: SeqState = SeqState.WAITING
    finish: FinishReason | None = None
    n_computed: int = 0
    n_scheduled: int = 0
    n_cached: int = 0
    n_preempted: int = 0
    in_flight: int = 0
    """Launched works that may still touch this sequence's blocks; they are freed only at 0."""
    blocks: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    last_token_at: float | None = None
    admitted_at: float | None = None
    finish_code: str | None = None
    rank: tuple[float, int] = (0.0, 0)
    turn: int = 0
    slot: int = -1
    block_hashes: list[bytes] = field(default_factory=list, repr=False)
    n_registered: int = 0
    frozen_blocks: BlockTable | None = field(default=None, repr=False)
    n_prompt_scored: int = 0
    copy_ticket: int = 0
    range_end: int = 0
    next_layer: int = 0
    whole_chunks: bool = False
    in_crowd: bool = False

    @property
    def n_output(self) -> int:
        """Accepted output tokens so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def stalled(self) -> bool:
        """True while a launched work builds on a step that has to be run again."""
        if self.next_layer:
            return False
        return self.in_flight > 0 and self.n_scheduled == self.n_computed

    def move(self, state: SeqState) -> None:
        """Go to `state`. Raises IllegalTransition on an edge that does not exist."""
        if state not in _LEGAL[self.state]:
            raise IllegalTransition(f"{self.key}: {self.state.value} -> {state.value}")
        self.state = state
