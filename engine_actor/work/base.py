"""What every work has in common: six states, four verbs, one legal step each.

A work is one forward pass of one step: prepare, launch, sample, finish. The first three only put
work on the device; finish() is the host's, and may come after the next step was launched. It knows
the plan's ints, the runner and the sampler; it does not know the scheduler. `isolate` decides what
happens when a verb raises.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

import torch

from engine_actor.core.plan import SampledToken, TokenLogprobs
from engine_actor.core.sequence import Key, SeqState
from engine_actor.core.sequence import Sequence as Request
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.pending_sample import PendingSample
from engine_actor.model.runner_protocol import Runner
from engine_actor.model.sampler import Sampler, SampleRow
from engine_actor.work.inputs import PLAIN, Feed
from engine_actor.work.sampling import sample_row
from engine_actor.work.timing import Timer


class WorkState(enum.Enum):
    """NEW > PREPARED > LAUNCHED > SAMPLED > DONE; FAILED from any of them but DONE."""

    NEW = "NEW"
    PREPARED = "PREPARED"
    LAUNCHED = "LAUNCHED"
    SAMPLED = "SAMPLED"
    DONE = "DONE"
    FAILED = "FAILED"


class WorkStateError(RuntimeError):
    """A bug of ours: a verb was called in a state that does not allow it."""


class Lane(Protocol):
    """Where a launch runs: a device stream of its own, or the caller's."""

    def entered(self) -> AbstractContextManager[object]: ...

    def new_timer(self) -> Timer: ...


class StageHook(Protocol):
    """Called as each verb begins; the fault plan raises from here. Real works hit no fault."""

    def __call__(self, stage: str, trace_ids: Sequence[str], rows: int) -> None: ...


def no_fault(stage: str, trace_ids: Sequence[str], rows: int) -> None:
    """The hook of production: nothing."""


class Sampled(NamedTuple):
    """One row of the logits that becomes a token: the token's index in its sequence, and the place
    in the token buffer that the next step may read it from."""

    key: Key
    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class WorkContext:
    """What the works of one engine share.

    `request` gives the sequence behind a key, None where it is gone. `cover(n)` makes the KV
    tensors hold block ids below n and may raise out of memory. `feed` carries the inputs.
    """

    runner: Runner
    sampler: Sampler
    block_tokens: int
    eos_token_ids: frozenset[int]
    request: Callable[[Key], Request | None]
    cover: Callable[[int], None] = lambda n_blocks: None
    hook: StageHook = no_fault
    feed: Feed = PLAIN


@dataclass(frozen=True, slots=True)
class WorkResult:
    """What finish() reports: the parts of a StepOutcome that one work knows."""

    computed: tuple[tuple[Key, int], ...] = ()
    sampled: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[tuple[Key, int, tuple[TokenLogprobs, ...]], ...] = ()


@dataclass(eq=False)
class Work(ABC):
    """One forward pass. `number` is the step's, for messages."""

    number: int
    context: WorkContext
    state: WorkState = field(default=WorkState.NEW, init=False)
    timer: Timer | None = field(default=None, init=False)
    inputs: BatchInputs | None = field(default=None, init=False)
    logits: torch.Tensor | None = field(default=None, init=False)
    pending: PendingSample | None = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    result: WorkResult | None = field(default=None, init=False)

    kind = "work"

    @property
    @abstractmethod
    def keys(self) -> tuple[Key, ...]:
        """The sequences in it, in row order."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows of the hidden state."""

    @property
    @abstractmethod
    def sampled(self) -> tuple[Sampled, ...]:
        """The rows of its logits, in order."""

    @abstractmethod
    def halves(self) -> tuple[Work, ...]:
        """The same work as two smaller NEW ones, or nothing where it cannot be split."""

    @abstractmethod
    def without(self, keys: Set[Key]) -> Work | None:
        """Itself where it has none of `keys`, else a NEW work of the rest; None where all go."""

    @property
    def can_be_retried(self) -> bool:
        """False where it builds on what a step before it left: then the scheduler plans anew."""
        return True

    def again(self) -> Self:
        """The same work as a NEW one."""
        return replace(self)

    @property
    @abstractmethod
    def blocks_needed(self) -> int:
        """KV blocks that its sequences hold."""

    def prepare(self) -> None:
        """Build the inputs and copy them to the device. Never runs the model."""
        self._require("prepare", WorkState.NEW)
        self._hook("prepare")
        self.context.cover(self._blocks_end())
        self.inputs = self._build()
        self.state = WorkState.PREPARED

    def launch(self, lane: Lane) -> None:
        """Run the forward pass on `lane`. Changes no request."""
        self._require("launch", WorkState.PREPARED)
        self._hook("launch")
        with lane.entered():
            self.timer = lane.new_timer()
            self.timer.start()
            self._forward()
            self.timer.stop()
        self.state = WorkState.LAUNCHED

    def sample(self) -> None:
        """After the join on the device: put the sampling on the caller's stream, behind the join.
        The host waits for nothing; a CPU has sampled when this returns."""
        self._require("sample", WorkState.LAUNCHED)
        self._hook("sample")
        self._begin_sampling()
        self.state = WorkState.SAMPLED

    def finish(self) -> WorkResult:
        """After the host has waited for the step: report. Raises whatever the sampler raises."""
        self._require("finish", WorkState.SAMPLED)
        self._hook("finish")
        self.result = self._report()
        self._release()
        self.state = WorkState.DONE
        return self.result

    def fail(self, error: BaseException) -> None:
        """Give up and drop every tensor, so that a smaller retry finds the memory free."""
        states = (WorkState.NEW, WorkState.PREPARED, WorkState.LAUNCHED, WorkState.SAMPLED)
        self._require("fail", *states)
        self._release()
        self.timer = None
        self.error = error
        self.state = WorkState.FAILED

    def elapsed(self) -> float | None:
        """Seconds of the launch; None where it never ran to its end."""
        return None if self.timer is None else self.timer.elapsed()

    @abstractmethod
    def _build(self) -> BatchInputs: ...

    @abstractmethod
    def _forward(self) -> None: ...

    @abstractmethod
    def _report(self) -> WorkResult: ...

    @abstractmethod
    def _blocks_end(self) -> int:
        """One more than the highest block id that the work touches."""

    def _release(self) -> None:
        self.inputs = None
        self.logits = None
        self.pending = None

    def _hook(self, stage: str) -> None:
        hook = self.context.hook
        if hook is not no_fault:
            found = (self.context.request(key) for key in self.keys)
            hook(stage, [request.trace_id for request in found if request is not None], self.rows)

    def _require(self, verb: str, *states: WorkState) -> None:
        if self.state not in states:
            raise WorkStateError(f"{self.kind} work {self.number}: {verb} in {self.state.name}")

    def _prepared_inputs(self) -> BatchInputs:
        if self.inputs is None:
            raise WorkStateError(f"{self.kind} work {self.number}: no inputs in {self.state.name}")
        return self.inputs

    def _begin_sampling(self) -> None:
        """Rows of requests that have ended already are left out."""
        if self.logits is None:
            return
        context = self.context
        wanted = self.sampled
        alive: list[int] = []
        rows: list[SampleRow] = []
        for index, row in enumerate(wanted):
            request = context.request(row.key)
            if request is not None and request.state is not SeqState.DONE:
                alive.append(index)
                rows.append(sample_row(request, row.position, context.eos_token_ids))
        if not rows:
            return
        logits = self.logits if len(alive) == len(wanted) else self.logits[alive]
        slots = [wanted[index].slot for index in alive]
        tokens = context.feed.tokens
        buffer = None if tokens is None else tokens.reach(max(slots))
        self.pending = context.sampler.begin(logits, rows, buffer, slots)

    def _tokens(self) -> tuple[SampledToken, ...]:
        """What was sampled. Rows of requests that ended between sample and finish are dropped."""
        if self.pending is None:
            return ()
        return tuple(token for token in self.pending.result() if self._is_alive(token.key))

    def _is_alive(self, key: Key) -> bool:
        request = self.context.request(key)
        return request is not None and request.state is not SeqState.DONE
