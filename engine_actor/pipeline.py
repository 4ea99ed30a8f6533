"""Launched steps and their end: at depth 1 the next step is put on the device before the host has
read the last one.

Knows plans, the step runner and when a step must not stay open; what an outcome does to requests is
the engine's (`commit`). Steps end in the order of their launch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from configs.schema import EngineConfig
from engine_actor.core.plan import StepPlan
from engine_actor.core.prefill_plan import is_early
from engine_actor.core.scheduler import Scheduler
from engine_actor.core.sequence import Key, Sequence
from engine_actor.model.penalties import reads_history
from engine_actor.work.host_copies import Copies
from engine_actor.work.inputs import Feed
from engine_actor.work.pair import SerialPair
from engine_actor.work.staging import PinnedStaging
from engine_actor.work.step import OpenStep, StepReport, StepRunner
from engine_actor.work.token_buffer import TokenBuffer


def make_feed(device: torch.device, depth: int, config: EngineConfig) -> Feed:
    """How inputs reach `device`; with a token buffer where steps are planned ahead. Sequences that
    leave keep their slots for up to two steps, so there may be more slots than sequences."""
    tokens = TokenBuffer(device, 2 * config.max_num_seqs) if depth else None
    if device.type == "cpu":
        return Feed(tokens=tokens)
    return Feed(PinnedStaging(device, SerialPair(device).fence, config.chunk_tokens), tokens)


LOOK_S, LOOKS = 0.00003, 3
"""Between looks at a long step, and looks before whoever has come is taken in. Shorter than a sleep
can be, so a sleep takes twice that."""
MOST_LOOKS = 2000
"""At a long step before the host just waits for it: a device that hangs must be seen to hang."""

Commit = Callable[[StepPlan, StepReport, float], None]
"""Takes in a finished step; the float: seconds since the one before it, host work included."""


class Pipeline:
    """`depth` steps may stay open when advance() returns, 0 or 1."""

    def __init__(
        self,
        steps: StepRunner,
        scheduler: Scheduler,
        request: Callable[[Key], Sequence | None],
        commit: Commit,
        depth: int,
        copies: Copies,
    ) -> None:
        self.depth = depth
        self._copies = copies
        self._steps = steps
        self._scheduler = scheduler
        self._request = request
        self._commit = commit
        self._open: deque[OpenStep] = deque()
        self._lost: list[OpenStep] = []
        self._mark = 0.0
        self._looks = 0

    @property
    def n_open(self) -> int:
        """Steps that are launched and not finished."""
        return len(self._open)

    def advance(self, plan: StepPlan, started: float) -> None:
        """Launch a plan, then finish what may not stay open. `started`: when planning began, by
        time.perf_counter(). Raises FatalDeviceError where the device is lost.
        """
        if not self._open:
            self._mark = started
        self._copies.begin(plan.copies)
        if plan.empty:
            self._end_all_but(0)
            return
        void: frozenset[Key] = frozenset()
        if self._open and self._reads_open_tokens(plan):
            self._end_all_but(0)
            void = self._scheduler.void(plan.step)
        self._copies.wait(plan.waits_for)
        step = self._steps.launch(plan, void)
        self._looks = 0
        self._open.append(step)
        self._scheduler.look_ahead(plan)
        # What failed is run again in smaller pieces, behind all that came before it; scores of a
        # prompt are computed as the step is finished, and nothing may be launched before them.
        alone = step.failed or any(chunk.prompt_logprobs is not None for chunk in plan.prefill)
        self._end_all_but(0 if alone else self.depth)

    def holds(self) -> bool:
        """True where nothing is to be planned now: the open step is long, and whoever comes before
        it ends should be in the next one. Then it has been looked at, and is finished once the
        device has done it. Raises FatalDeviceError where the device is lost.
        """
        limits, scheduler = self._scheduler.limits, self._scheduler
        if not self._open or not is_early(
            self._open[-1].plan, scheduler.running, scheduler.waiting, limits
        ):
            return False
        for _ in range(LOOKS):
            if self._looks >= MOST_LOOKS or _is_done(self._open[-1]):
                break
            self._looks += 1
            time.sleep(LOOK_S)
        else:
            return True
        self._end_all_but(0)
        return True

    def drop(self) -> None:
        """No step is open any more: the device is lost. What they hold of it is kept, since letting
        it go may ask the device once more."""
        self._lost += self._open
        self._open.clear()

    def _end_all_but(self, n_open: int) -> None:
        while len(self._open) > n_open:
            step = self._open.popleft()
            report = self._steps.finish(step, partial(self._scheduler.void, step.plan.step))
            now = time.perf_counter()
            seconds, self._mark = now - self._mark, now
            self._commit(step.plan, report, seconds)

    def _reads_open_tokens(self, plan: StepPlan) -> bool:
        """True where the sampling of a row reads tokens that an open step is still making."""
        for slot in plan.decode:
            if slot.token is None:
                request = self._request(slot.key)
                if request is not None and reads_history(request.sampling):
                    return True
        return False


def _is_done(step: OpenStep) -> bool:
    """A device that cannot say so is lost, which finishing the step finds out."""
    try:
        return step.launched.done.query()
    except RuntimeError:
        return True
