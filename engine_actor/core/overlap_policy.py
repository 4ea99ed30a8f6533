"""How the two works of a step share the device: the policy that chooses, step by step.

A step with one kind of work has nothing to share and is never asked about. Knows no device: which
modes it has is found out where the streams are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine_actor.core.plan import OverlapMode


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is known of a step that holds both kinds of work, before its chunks are cut.

    decode_rows: sequences that decode. prompt_tokens: that wait for a chunk, of those prompts that
    may have one. budget_tokens: prompt tokens that the step may take. longest_context: positions
    of the longest sequence in it.
    """

    decode_rows: int
    prompt_tokens: int
    budget_tokens: int
    longest_context: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """max_ctas: multiprocessors that the prefill's products may take; None for all."""

    mode: OverlapMode
    max_ctas: int | None = None


class OverlapPolicy(Protocol):
    """Chooses among the modes that the device has."""

    def choose(self, facts: StepFacts) -> Sharing: ...


class FixedPolicy:
    """The same for every step: what the configuration says."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def choose(self, facts: StepFacts) -> Sharing:
        return self._sharing


SERIAL = Sharing(OverlapMode.SERIAL)
ALWAYS_SERIAL = FixedPolicy(SERIAL)
