"""Drives a Scheduler over a PagedModel as an engine would, and checks every step it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine_actor.core.clock import ManualClock
from engine_actor.core.kv_manager import KVManager
from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import StepPlan
from engine_actor.core.scheduler import Finished, Scheduler, SchedulerLimits
from engine_actor.core.sequence import FinishReason, Key
from engine_actor.core.sequence import Sequence as Request
from tests.doubles.paged_model import EOS, Fault, PagedModel, solo_run

STEP_SECONDS = 0.01


class SchedulerHarness:
    """One scheduler, one model, one clock. `depth` is the pipeline depth."""

    def __init__(
        self,
        *,
        n_blocks: int = 64,
        block_tokens: int = 16,
        depth: int = 0,
        max_num_seqs: int = 16,
        max_queue: int = 256,
        max_partial_prefills: int = 4,
        chunk: int = 64,
        chunk_while_decoding: int | None = None,
        slice_tokens: int | None = None,
        burst_tokens: int | None = None,
        n_layers: int = 4,
        ageing_s: float = 5.0,
        max_model_len: int = 4096,
        prefix_cache: bool = True,
        host_slots: int = 0,
        few_blocks: int = 0,
        fault: Callable[[Key, int], Fault | None] | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.kv = KVManager(n_blocks, block_tokens, prefix_cache, host_slots)
        self.kv.copies.few = few_blocks
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_queue=max_queue,
            max_partial_prefills=max_partial_prefills,
            prefill_chunk_tokens=chunk,
            prefill_chunk_tokens_while_decoding=chunk_while_decoding,
            priority_ageing_s=ageing_s,
            max_model_len=max_model_len,
            pipeline_depth=depth,
            eos_token_ids=frozenset({EOS}),
            prefill_slice_tokens=slice_tokens,
            prefill_burst_tokens=burst_tokens,
            n_layers=n_layers,
        )
        self.scheduler = Scheduler(limits, self.kv, self.clock)
        self.model = PagedModel(block_tokens, fault)
        self.requests: dict[Key, Request] = {}
        self.ended: dict[Key, tuple[FinishReason, str | None]] = {}
        self.end_order: list[Key] = []
        self.plans: list[StepPlan] = []
        self._open: list[StepPlan] = []

    def add(
        self,
        rid: int,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str = "",
        deadline: float | None = None,
        sampling: SamplingParams | None = None,
    ) -> Request:
        """Submit a request of client "c"; greedy and without eos unless `sampling` says more."""
        sampling = sampling or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            key=("c", rid),
            tokens=list(prompt),
            sampling=sampling,
            n_prompt=len(prompt),
            arrived=self.clock.now(),
            priority=priority,
            deadline=deadline,
            salt=salt,
        )
        self.scheduler.add(request)
        self.requests[request.key] = request
        self.model.expect(request.key, prompt)
        return request

    def cancel(self, rid: int) -> Request | None:
        """Cancel a request of client "c"."""
        request = self.scheduler.cancel(("c", rid))
        if request is not None:
            self._end(request.key, FinishReason.CANCELLED, "cancelled")
        return request

    def evict(self, rid: int, requeue: bool = False) -> Request | None:
        """Evict a request of client "c"."""
        request = self.scheduler.evict(("c", rid), requeue)
        if request is not None and not requeue:
            self._end(request.key, FinishReason.OOM, "out_of_memory")
        return request

    def plan(self) -> StepPlan:
        """Plan and launch one step; the outcome stays open."""
        plan = self.scheduler.plan()
        self.plans.append(plan)
        self._check_plan(plan)
        for refusal in plan.refused:
            self._end(refusal.key, refusal.reason, refusal.code)
        if plan.empty:
            self.model.ask(plan.copies)
        else:
            self.model.launch(plan)
            self.scheduler.look_ahead(plan)
            self._open.append(plan)
        self.scheduler.check()
        return plan

    def land(self, n_lists: int) -> None:
        """Let the device make the next lists of copies, and the scheduler hear of it."""
        self.model.land(self.model.landed + n_lists)
        self.kv.copies.landed = self.model.landed

    @property
    def may_plan(self) -> bool:
        """True where the pipeline depth allows one more open step."""
        return self.model.n_open <= self.scheduler.limits.pipeline_depth

    def join(self) -> tuple[Finished, ...]:
        """Commit the oldest open step."""
        self._open.pop(0)
        finished = self.scheduler.commit(self.model.join())
        for end in finished:
            self._end(end.seq.key, end.reason, end.code)
        self.scheduler.check()
        live = (*self.scheduler.waiting, *self.scheduler.running)
        for request in (*live, *(end.seq for end in finished)):
            assert request.tokens == self.model.truth(request.key, len(request.tokens))
        return finished

    def step(self) -> StepPlan:
        """One engine cycle: plan, launch, commit what the pipeline depth does not keep open."""
        plan = self.plan()
        keep_open = 0 if plan.empty else self.scheduler.limits.pipeline_depth
        while len(self._open) > keep_open:
            self.join()
        self.clock.advance(STEP_SECONDS)
        return plan

    def run(self, max_steps: int = 2000) -> int:
        """Step until all work is done; fails where that takes too long. Returns the steps."""
        for n_steps in range(max_steps):
            if not self.scheduler.has_work:
                self.check_all_ended()
                return n_steps
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    def check_all_ended(self) -> None:
        """Every request ended once, with the text of its solo run; every block is back."""
        assert self.ended.keys() == self.requests.keys()
        for key, request in self.requests.items():
            reason, _ = self.ended[key]
            output, solo_reason = solo_run(request.tokens[: request.n_prompt], request.sampling)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (request.tokens[request.n_prompt :], reason) == (output, solo_reason)
            assert request.blocks == []
            assert request.in_flight == 0
        assert self.kv.n_free == self.kv.capacity
        self.scheduler.check()

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        budget = limits.prefill_chunk_tokens
        if plan.decode and limits.prefill_chunk_tokens_while_decoding is not None:
            budget = min(budget, limits.prefill_chunk_tokens_while_decoding)
        # The limits may have changed since an open range of layers began.
        begun = [chunk for chunk in plan.prefill if chunk.layers is None or not chunk.layers.first]
        assert sum(chunk.end - chunk.start for chunk in begun) <= budget
        assert len(plan.prefill) == 1 or all(chunk.layers is None for chunk in plan.prefill)
        assert len(plan.prefill) <= limits.max_partial_prefills
        parts = [part.key for part in (*plan.decode, *plan.prefill)]
        assert not set(parts) & set(plan.preempted), "preempted and served in one plan"
        assert len(self.scheduler.running) <= limits.max_num_seqs
        known = {slot.token for slot in plan.decode}
        assert limits.pipeline_depth == 1 or None not in known, "a token is unknown at depth 0"

    def _end(self, key: Key, reason: FinishReason, code: str | None) -> None:
        assert key not in self.ended, f"{key} ended twice"
        self.ended[key] = (reason, code)
        self.end_order.append(key)
