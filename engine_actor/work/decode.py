"""DecodeWork: one position of each of several sequences, and one new token for each.

Knows slots; does not know why these were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from engine_actor.core.plan import DecodeSlot
from engine_actor.core.sequence import Key, Sequence, blocks_end
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.work.base import Sampled, Work, WorkResult
from engine_actor.work.inputs import build_decode


def known_slots(
    slots: tuple[DecodeSlot, ...], request: Callable[[Key], Sequence | None]
) -> tuple[DecodeSlot, ...]:
    """Planned ahead and run later, a slot's token may have come in between: a retry must not read
    what its first attempt has left in the buffer."""
    return tuple(
        slot if slot.token is not None else _known(slot, request(slot.key)) for slot in slots
    )


def _known(slot: DecodeSlot, request: Sequence | None) -> DecodeSlot:
    if request is None or slot.position >= len(request.tokens):
        return slot
    return slot._replace(token=request.tokens[slot.position])


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

    @property
    def sampled(self) -> tuple[Sampled, ...]:
        return tuple(Sampled(slot.key, slot.position + 1, slot.slot) for slot in self.slots)

    @property
    def computed(self) -> tuple[tuple[Key, int], ...]:
        """Up to which position each sequence has KV once this is done."""
        return tuple((slot.key, slot.position + 1) for slot in self.slots)

    def halves(self) -> tuple[DecodeWork, ...]:
        if len(self.slots) < 2:
            return ()
        middle = len(self.slots) // 2
        return tuple(
            replace(self, slots=part) for part in (self.slots[:middle], self.slots[middle:])
        )

    def without(self, keys: Set[Key]) -> DecodeWork | None:
        left = tuple(slot for slot in self.slots if slot.key not in keys)
        if len(left) == len(self.slots):
            return self
        return replace(self, slots=left) if left else None

    def _build(self) -> BatchInputs:
        context = self.context
        slots = known_slots(self.slots, context.request)
        return build_decode(slots, context.block_tokens, context.runner.device, context.feed)

    def _forward(self) -> None:
        self.logits = self.context.runner.decode_logits(self._prepared_inputs())

    def _report(self) -> WorkResult:
        return WorkResult(
            computed=self.computed,
            sampled=self._tokens(),
        )

    def _blocks_end(self) -> int:
        return max([blocks_end(slot.blocks) for slot in self.slots])
