"""What every work has in common: five states, three verbs, one legal step each.

A work is one forward pass of one step. It knows the plan's ints, the runner and the sampler; it
does not know the scheduler, and only finish() looks at requests. `isolate` decides what happens
when a verb raises.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch

from engine_actor.core.plan import SampledToken, TokenLogprobs
from engine_actor.core.sequence import Key, SeqState
from engine_actor.core.sequence import Sequence as Request
from engine_actor.model.runner_protocol import Runner
from engine_actor.model.sampler import Sampler, SampleRow
from engine_actor.work.inputs import BatchInputs
from engine_actor.work.timing import Timer


class WorkState(enum.Enum):
    """NEW > PREPARED > LAUNCHED > DONE; FAILED from any of them but DONE."""

    NEW = "NEW"
    PREPARED = "PREPARED"
    LAUNCHED = "LAUNCHED"
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


@dataclass(frozen=True, slots=True)
class WorkContext:
    """What the works of one engine share.

    `request` gives the sequence behind a key, None where it is gone. `cover(n)` makes the KV
    tensors hold block ids below n and may raise out of memory.
    """

    runner: Runner
    sampler: Sampler
    block_tokens: int
    eos_token_ids: frozenset[int]
    request: Callable[[Key], Request | None]
    cover: Callable[[int], None] = lambda n_blocks: None
    hook: StageHook = no_fault


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

    @abstractmethod
    def halves(self) -> tuple[Self, ...]:
        """The same work as two NEW ones of half the size, or nothing where it cannot be split."""

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

    def finish(self) -> WorkResult:
        """After the join: sample and report. Raises whatever the sampler raises."""
        self._require("finish", WorkState.LAUNCHED)
        self._hook("finish")
        self.result = self._report()
        self._release()
        self.state = WorkState.DONE
        return self.result

    def fail(self, error: BaseException) -> None:
        """Give up and drop every tensor, so that a smaller retry finds the memory free."""
        self._require("fail", WorkState.NEW, WorkState.PREPARED, WorkState.LAUNCHED)
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

    def _sample(self, keys: Sequence[Key]) -> tuple[SampledToken, ...]:
        """One token for each key, from logits in the same order. Rows of requests that ended
        between launch and finish are dropped here."""
        if self.logits is None:
            return ()
        alive: list[int] = []
        rows: list[SampleRow] = []
        for index, key in enumerate(keys):
            request = self.context.request(key)
            if request is not None and request.state is not SeqState.DONE:
                alive.append(index)
                rows.append(sample_row(request, self.context.eos_token_ids))
        if not rows:
            return ()
        logits = self.logits if len(alive) == len(keys) else self.logits[alive]
        return tuple(self.context.sampler.sample(logits, rows))


def sample_row(request: Request, eos_token_ids: frozenset[int]) -> SampleRow:
    """What the sampler needs of a request. Ids are copied only where a penalty reads them, so that
    a long context costs a plain step nothing."""
    sampling = request.sampling
    penalised = (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
    banned: tuple[int, ...] = ()
    if request.n_output < sampling.min_tokens:
        ends = () if sampling.ignore_eos else tuple(eos_token_ids)
        banned = (*sampling.stop_token_ids, *ends)
    return SampleRow(
        key=request.key,
        sampling=sampling,
        prompt_ids=request.tokens[: request.n_prompt] if penalised else (),
        output_ids=request.tokens[request.n_prompt :] if penalised else (),
        position=len(request.tokens),
        banned=banned,
    )
