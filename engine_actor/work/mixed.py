"""MixedWork: the decoded rows and the prompt chunks of a step in one forward pass.

Every weight is read once for both. The rows of the decode work come first, so its logits do too.
Knows its two parts; what goes wrong with them together is tried again with each alone.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from engine_actor.core.sequence import Key
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.work.base import Sampled, Work, WorkResult
from engine_actor.work.decode import DecodeWork, known_slots
from engine_actor.work.inputs import build_mixed
from engine_actor.work.prefill import PrefillWork


@dataclass(eq=False)
class MixedWork(Work):
    """Neither part is ever launched; they say what belongs to whom."""

    decode: DecodeWork = field(kw_only=True)
    prefill: PrefillWork = field(kw_only=True)

    kind = "mixed"

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.decode.keys + self.prefill.keys

    @property
    def rows(self) -> int:
        return self.decode.rows + self.prefill.rows

    @property
    def blocks_needed(self) -> int:
        return self.decode.blocks_needed + self.prefill.blocks_needed

    @property
    def sampled(self) -> tuple[Sampled, ...]:
        return self.decode.sampled + self.prefill.sampled

    def halves(self) -> tuple[Work, ...]:
        """Its two parts, each a forward of its own."""
        return self.decode.again(), self.prefill.again()

    def without(self, keys: Set[Key]) -> Work | None:
        decode, prefill = self.decode.without(keys), self.prefill.without(keys)
        if decode is self.decode and prefill is self.prefill:
            return self
        if decode is None or prefill is None:
            left = decode or prefill
            return None if left is None else left.again()
        return replace(self, decode=decode, prefill=prefill)

    def _build(self) -> BatchInputs:
        context = self.context
        slots = known_slots(self.decode.slots, context.request)
        return build_mixed(
            slots,
            self.prefill.chunks,
            context.block_tokens,
            context.runner.device,
            context.feed,
        )

    def _forward(self) -> None:
        runner, inputs = self.context.runner, self._prepared_inputs()
        if not self.prefill.scores_prompts:
            self.logits = runner.last_logits(runner.embed(inputs), inputs, 0)
            return
        hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
        self.logits = runner.logits(hidden, inputs.logit_rows)
        self.prefill.hidden = hidden[self.decode.rows :]

    def _report(self) -> WorkResult:
        tokens = self._tokens()
        return WorkResult(
            computed=self.decode.computed + self.prefill.computed,
            sampled=tokens,
            prompt_logprobs=tuple(self.prefill.prompt_logprobs()),
        )

    def _blocks_end(self) -> int:
        return max(self.decode._blocks_end(), self.prefill._blocks_end())

    def _release(self) -> None:
        super()._release()
        self.prefill.hidden = None
