"""A step with both kinds of work asks the policy how they share the device, and says so."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_actor.core.overlap_policy import FixedPolicy, Sharing, StepFacts
from engine_actor.core.plan import OverlapMode, StepPlan
from tests.doubles.scheduler_harness import SchedulerHarness

CAPPED = Sharing(OverlapMode.TWO_STREAMS_CAPPED, 100)


@dataclass
class Asked:
    """Answers always the same and keeps the questions."""

    sharing: Sharing
    facts: list[StepFacts] = field(default_factory=list)

    def choose(self, facts: StepFacts) -> Sharing:
        self.facts.append(facts)
        return self.sharing


def planned(harness: SchedulerHarness, policy: Asked | FixedPolicy) -> StepPlan:
    """One step with this policy, committed."""
    plan = harness.scheduler.plan(policy)
    harness.model.launch(plan)
    harness._open.append(plan)
    harness.join()
    return plan


def decoding(chunk: int = 512, n: int = 8) -> SchedulerHarness:
    """n sequences that decode, each with 6 tokens by now."""
    harness = SchedulerHarness(n_blocks=400, chunk=chunk, prefix_cache=False, max_num_seqs=n + 4)
    for rid in range(n):
        harness.add(rid, [rid + 2] * 5, max_tokens=300)
    while any(seq.n_output == 0 for seq in harness.scheduler.running) or not len(
        harness.scheduler.running
    ):
        harness.step()
    return harness


def test_only_a_step_with_both_kinds_asks() -> None:
    harness, policy = decoding(), Asked(CAPPED)
    alone = planned(harness, policy)
    assert (alone.mode, alone.max_ctas, policy.facts) == (OverlapMode.SERIAL, None, [])
    harness.add(100, range(2, 902))
    both = planned(harness, policy)
    assert (both.mode, both.max_ctas) == (OverlapMode.TWO_STREAMS_CAPPED, 100)
    (facts,) = policy.facts
    assert (facts.decode_rows, facts.prompt_tokens, facts.budget_tokens) == (8, 900, 512)
    assert facts.longest_context == max(slot.position + 1 for slot in both.decode)


def test_a_mixed_step_fills_whole_tiles() -> None:
    """S-111: 8 rows beside 504, and the rest of the prompt as it is."""
    harness, policy = decoding(), FixedPolicy(Sharing(OverlapMode.MIXED))
    harness.add(100, range(2, 902))
    plans = [planned(harness, policy) for _ in range(3)]
    assert [plan.mode for plan in plans] == [OverlapMode.MIXED] * 2 + [OverlapMode.SERIAL]
    assert [(chunk.start, chunk.end) for plan in plans for chunk in plan.prefill] == [
        (0, 504),
        (504, 900),
    ]
    assert len(plans[0].decode) + 504 == 512


def test_without_streams_a_mixed_policy_takes_whole_chunks() -> None:
    harness, policy = decoding(n=1), FixedPolicy(Sharing(OverlapMode.MIXED))
    harness.cancel(0)
    harness.add(100, range(2, 902))
    assert [chunk.end for chunk in planned(harness, policy).prefill] == [512]
