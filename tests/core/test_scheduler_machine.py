"""Random traffic against the scheduler: any arrivals, cancels, evictions, limits and faults.

After every step the KV manager's invariants hold and every KV cell read is right; at the end each
request has ended once, with the text of its solo run, and all blocks are back.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine_actor.core.params import SamplingParams
from engine_actor.core.sequence import Key
from engine_actor.errors import ContextLengthExceeded, Overloaded
from tests.doubles.paged_model import Fault
from tests.doubles.scheduler_harness import SchedulerHarness

PREFIXES = ([], [1] * 9, [1] * 8 + [2], [2] * 17)


class SchedulerMachine(RuleBasedStateMachine):
    """An engine under random traffic. Plans and joins come apart, as far as the depth allows."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[Fault] = []
        self.n_added = 0

    @initialize(
        n_blocks=st.integers(3, 20),
        block_tokens=st.sampled_from([2, 4, 16]),
        depth=st.sampled_from([0, 1]),
        partial_prefills=st.sampled_from([1, 4]),
        chunk=st.sampled_from([1, 3, 7, 16, 64]),
        chunk_while_decoding=st.sampled_from([None, 2, 8]),
        slice_tokens=st.sampled_from([None, 1, 2, 5]),
        burst_tokens=st.sampled_from([None, 4, 20]),
        max_num_seqs=st.sampled_from([1, 2, 3, 8]),
        prefix_cache=st.booleans(),
        host_slots=st.sampled_from([0, 0, 1, 3, 30]),
        few_blocks=st.sampled_from([0, 0, 2, 32]),
    )
    def start(self, partial_prefills: int, **knobs: int) -> None:
        self.engine = SchedulerHarness(
            max_partial_prefills=partial_prefills, max_queue=10, ageing_s=0.05, **knobs
        )
        self.engine.model.fault = self._fault

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rest=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        max_tokens=st.integers(0, 25),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        priority=st.integers(-1, 2),
        salt=st.sampled_from(["", "", "x"]),
        seconds=st.sampled_from([None, None, None, 0.05, 0.3]),
    )
    def add(
        self,
        prefix: list[int],
        rest: list[int],
        max_tokens: int,
        min_tokens: int,
        ignore_eos: bool,
        prompt_logprobs: int | None,
        priority: int,
        salt: str,
        seconds: float | None,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=(4,),
        )
        deadline = None if seconds is None else self.engine.clock.now() + seconds
        self.n_added += 1
        try:
            self.engine.add(
                self.n_added,
                [*prefix, *rest],
                sampling=sampling,
                priority=priority,
                salt=salt,
                deadline=deadline,
            )
        except (ContextLengthExceeded, Overloaded):
            return

    @rule(back=st.integers(0, 7))
    def cancel(self, back: int) -> None:
        self.engine.cancel(self.n_added - back)
        self.engine.scheduler.check()

    @rule(back=st.integers(0, 7), requeue=st.booleans())
    def evict(self, back: int, requeue: bool) -> None:
        self.engine.evict(self.n_added - back, requeue)
        self.engine.scheduler.check()

    @rule(
        kv_fraction=st.sampled_from([None, 0.3, 0.5, 1.0]),
        max_num_seqs=st.sampled_from([None, 1, 2, 8]),
        chunk=st.sampled_from([None, 1, 5, 32]),
    )
    def limit(self, kv_fraction: float | None, max_num_seqs: int | None, chunk: int | None) -> None:
        self.engine.scheduler.limit(kv_fraction, max_num_seqs, chunk)
        self.engine.scheduler.check()

    @rule(n_blocks=st.integers(1, 24))
    def resize(self, n_blocks: int) -> None:
        self.engine.scheduler.resize(n_blocks)
        self.engine.scheduler.check()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.kv.reset_prefix_cache()
        self.engine.scheduler.check()

    @rule(n_lists=st.integers(1, 3))
    def land_copies(self, n_lists: int) -> None:
        self.engine.land(n_lists)

    @rule(n_blocks=st.integers(1, 24))
    def have_memory(self, n_blocks: int) -> None:
        self.engine.kv.in_memory = n_blocks

    @rule(kind=st.sampled_from(["retry", "partial", "silent", "mute", "fail"]))
    def break_something(self, kind: str) -> None:
        self.faults.append(Fault(kind))

    @precondition(lambda self: self.engine.may_plan)
    @rule()
    def plan(self) -> None:
        self.engine.plan()

    @precondition(lambda self: self.engine.model.n_open > 0)
    @rule()
    def join(self) -> None:
        self.engine.join()

    @rule(n_steps=st.integers(1, 12))
    def steps(self, n_steps: int) -> None:
        while not self.engine.may_plan:
            self.engine.join()
        for _ in range(n_steps):
            self.engine.step()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.faults.clear()
            self.steps(1)
            self.engine.run()

    def _fault(self, key: Key, n_tokens: int) -> Fault | None:
        return self.faults.pop() if self.faults else None


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=40)
