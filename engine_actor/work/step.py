"""One plan in, one outcome out, in two halves: makes the works, runs them isolated, and names who
is to blame.

Knows plans and works; changes no request and no block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from engine_actor.core.overlap_policy import Sharing
from engine_actor.core.plan import Failure, OverlapMode, StepOutcome, StepPlan
from engine_actor.core.sequence import FinishReason, Key
from engine_actor.errors import EngineError, OutOfMemory
from engine_actor.work.base import Work, WorkContext, WorkState
from engine_actor.work.decode import DecodeWork
from engine_actor.work.elastic import KVGrowthError
from engine_actor.work.isolate import Casualty, Isolation, Tally
from engine_actor.work.mixed import MixedWork
from engine_actor.work.pair import Launched
from engine_actor.work.prefill import OpenChunk, PrefillWork
from engine_actor.work.timing import intersection


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome for the scheduler, and what only the engine needs to know.

    `grounded`: sequences that hold blocks which the device has no memory for.
    """

    outcome: StepOutcome
    grounded: tuple[Key, ...] = ()
    retries: int = 0


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step that is launched and not finished."""

    plan: StepPlan
    decode: DecodeWork | None
    prefill: PrefillWork | None
    launched: Launched

    @property
    def failed(self) -> bool:
        """True where a work did not get through its first half."""
        return any(work.state is WorkState.FAILED for work in self.launched.works)


class StepRunner:
    """Runs plans. `victim` picks the youngest of the lowest priority among keys; `n_free` says how
    many blocks are free, for the report."""

    def __init__(
        self,
        context: WorkContext,
        isolation: Isolation,
        victim: Callable[[Iterable[Key]], Key],
        n_free: Callable[[], int],
    ) -> None:
        self._context = context
        self._isolation = isolation
        self._victim = victim
        self._n_free = n_free
        self._open_chunk = OpenChunk()

    def launch(self, plan: StepPlan, void: Set[Key] = frozenset()) -> OpenStep:
        """Put the step on the device, without the sequences in `void`. Raises FatalDeviceError
        where it is lost."""
        decode = DecodeWork(plan.step, self._context, slots=plan.decode) if plan.decode else None
        prefill = self._prefill(plan) if plan.prefill else None
        if void:
            decode = decode and decode.without(void)
            prefill = prefill and prefill.without(void)
        if prefill is None:
            self._open_chunk.close()
        if decode is not None and prefill is not None:
            # Two works at once may read the same blocks, never write the same sequence's.
            assert not set(decode.keys) & set(prefill.keys), "a sequence is in both works"
        sharing = Sharing(plan.mode, plan.max_ctas)
        if decode is None or prefill is None or plan.mode is not OverlapMode.MIXED:
            launched = self._isolation.launch(decode, prefill, sharing)
        else:
            both = MixedWork(plan.step, self._context, decode=decode, prefill=prefill)
            launched = self._isolation.launch(both, None, sharing)
        return OpenStep(plan, decode, prefill, launched)

    def _prefill(self, plan: StepPlan) -> PrefillWork:
        layers = plan.prefill[0].layers
        if layers is None or layers.first == 0:
            # Whatever was half way belongs to a sequence that has ended or begins again.
            self._open_chunk = OpenChunk()
        return PrefillWork(
            plan.step, self._context, chunks=plan.prefill, open_chunk=self._open_chunk
        )

    def finish(self, step: OpenStep, void: Callable[[], Set[Key]] = frozenset) -> StepReport:
        """Wait for the oldest open step, and retry what failed of it, but not for the sequences
        that `void` names. Raises FatalDeviceError."""
        tally = self._isolation.finish(step.launched, void)
        grounded = tuple(c.key for c in tally.casualties if isinstance(c.error, KVGrowthError))
        failures = self._blame(c for c in tally.casualties if c.key not in grounded)
        return StepReport(_outcome(step, tally, failures), grounded, tally.retries)

    def _blame(self, casualties: Iterable[Casualty]) -> tuple[Failure, ...]:
        """Every sequence that failed for a reason of its own, and one of those short of memory:
        with its blocks gone the others may well pass in the next step."""
        failures: list[Failure] = []
        starved: dict[Key, Casualty] = {}
        for casualty in casualties:
            if casualty.starved:
                starved[casualty.key] = casualty
            else:
                failures.append(self._failure(casualty, FinishReason.ERROR, EngineError.code))
        if starved:
            blamed = starved[self._victim(starved)]
            failures.append(self._failure(blamed, FinishReason.OOM, OutOfMemory.code))
        return tuple(failures)

    def _failure(self, casualty: Casualty, reason: FinishReason, code: str) -> Failure:
        detail = f"{type(casualty.error).__name__}: {casualty.error}"
        return Failure(casualty.key, reason, code, detail, casualty.blocks, self._n_free())


def _outcome(step: OpenStep, tally: Tally, failures: tuple[Failure, ...]) -> StepOutcome:
    decode: Work | None = step.decode
    prefill: Work | None = step.prefill
    computed = {key: end for result in tally.results for key, end in result.computed}
    failed = {failure.key for failure in failures}
    overlapped = intersection(decode.timer, prefill.timer) if decode and prefill else 0.0
    return StepOutcome(
        step.plan,
        computed=tuple(computed.items()),
        sampled=tuple(token for result in tally.results for token in result.sampled),
        prompt_logprobs=tuple(entry for r in tally.results for entry in r.prompt_logprobs),
        failures=failures,
        retry=tuple(
            casualty.key
            for casualty in tally.casualties
            if casualty.key not in failed and casualty.key not in computed
        )
        + tuple(tally.put_off),
        rerun=frozenset(tally.rerun),
        logical_overlap=decode is not None and prefill is not None,
        stream_overlap=tally.stream_overlap,
        mixed_forward=MixedWork.kind in tally.seconds,
        mixed_seconds=tally.seconds.get(MixedWork.kind),
        prefill_seconds=tally.seconds.get("prefill"),
        decode_seconds=tally.seconds.get("decode"),
        overlapped_seconds=overlapped if tally.stream_overlap else 0.0,
    )
