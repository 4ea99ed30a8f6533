"""What a conversion measured, as it goes into the checkpoint. Knows no method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_actor.quant.evaluate import Score
from engine_actor.quant.plan import Plan
from engine_actor.quant.texts import TokenRows

FILE = "quantisation.json"
"""The full report of a converted folder; config.json has its summary."""
DIGITS = 6


@dataclass(frozen=True, slots=True)
class Report:
    """layers: per layer the relative error of each linear's output on the calibration text (of its
    weights where none was used). source, rounded: scores on the evaluation text, or None.
    """

    recipe: Mapping[str, Any]
    plan: Plan
    layers: Sequence[Mapping[str, float]]
    calibration: TokenRows | None
    evaluation: TokenRows | None
    source: Score | None
    rounded: Score | None

    def summary(self) -> dict[str, Any]:
        """For config.json."""
        found: dict[str, Any] = {"bits_per_weight": round(self.plan.bits_per_weight, DIGITS)}
        if self.calibration is not None:
            found["calibrated_on"] = self.calibration.described()
        if self.evaluation is not None and self.source is not None and self.rounded is not None:
            found["measured_on"] = self.evaluation.described()
            found["source_perplexity"] = round(self.source.perplexity, DIGITS)
            found["perplexity"] = round(self.rounded.perplexity, DIGITS)
            found["kl"] = None if self.rounded.kl is None else round(self.rounded.kl, DIGITS)
            found["top1"] = None if self.rounded.top1 is None else round(self.rounded.top1, DIGITS)
        return found

    def document(self) -> dict[str, Any]:
        """For FILE."""
        layers = [
            {name: float(f"{error:.{DIGITS}g}") for name, error in layer.items()}
            for layer in self.layers
        ]
        return {"recipe": dict(self.recipe), "report": self.summary(), "layer_errors": layers}

    def lines(self) -> list[str]:
        """For a reader."""
        lines = [f"  {self.plan.bits_per_weight:.3f} bits a weight in the layers"]
        if self.rounded is not None and self.source is not None:
            lines += score_lines(self.rounded, self.source)
        return lines


def score_lines(model: Score, source: Score | None) -> list[str]:
    """Perplexity, and what a source adds."""
    if source is None or model.kl is None or model.top1 is None:
        return [f"  perplexity {model.perplexity:.3f} over {model.positions} positions"]
    growth = 100 * (model.perplexity / source.perplexity - 1)
    return [
        f"  perplexity {model.perplexity:.3f}, source {source.perplexity:.3f} ({growth:+.1f} %), "
        f"over {model.positions} positions",
        f"  KL to the source {model.kl:.4f} nats, same first choice {100 * model.top1:.1f} %",
    ]
