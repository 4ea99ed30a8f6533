"""DecodeWork: one position of each of several sequences, and one new token for each.

Knows slots; does not know why these were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine_actor.core.plan import DecodeSlot
from engine_actor.core.sequence import Key
from engine_actor.work.base import Work, WorkResult
from engine_actor.work.inputs import BatchInputs, build_decode


@dataclass(eq=False)
class DecodeWork(Work):
    """Its rows are its slots, in order; logits f32[len(slots), vocab] between launch and finish."""

    slots: tuple[DecodeSlot, ...] = ()

    kind = "decode"

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(slot.key for slot in self.slots)

    @property
    def rows(self) -> int:
        return len(self.slots)

    @property
    def blocks_needed(self) -> int:
        return sum(len(slot.blocks) for slot in self.slots)

    def halves(self) -> tuple[DecodeWork, ...]:
        if len(self.slots) < 2:
            return ()
        middle = len(self.slots) // 2
        return tuple(
            replace(self, slots=part) for part in (self.slots[:middle], self.slots[middle:])
        )

    def _build(self) -> BatchInputs:
        context = self.context
        return build_decode(self.slots, context.block_tokens, context.runner.device)

    def _forward(self) -> None:
        runner, inputs = self.context.runner, self._prepared_inputs()
        hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
        self.logits = runner.logits(hidden, inputs.logit_rows)

    def _report(self) -> WorkResult:
        return WorkResult(
            computed=tuple((slot.key, slot.position + 1) for slot in self.slots),
            sampled=self._sample(self.keys),
        )

    def _blocks_end(self) -> int:
        return 1 + max(max(slot.blocks) for slot in self.slots)
