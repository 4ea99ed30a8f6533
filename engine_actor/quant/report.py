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
class Scores:
    """On the evaluation text: of the source, of what was written, and, where that was tuned, of the
    model before tuning.
    """

    source: Score
    rounded: Score
    untuned: Score | None


@dataclass(frozen=True, slots=True)
class Report:
    """layers: per layer the relative error of each linear's output on the calibration text (of its
    weights where none was used). tuned: what tuning the whole model came to.
    """

    recipe: Mapping[str, Any]
    plan: Plan
    layers: Sequence[Mapping[str, float]]
    calibration: TokenRows | None
    evaluation: TokenRows | None
    scores: Scores | None
    tuned: Mapping[str, Any] | None = None

    @property
    def rounded(self) -> Score | None:
        """Of what was written."""
        return None if self.scores is None else self.scores.rounded

    def summary(self) -> dict[str, Any]:
        """For config.json."""
        found: dict[str, Any] = {"bits_per_weight": round(self.plan.bits_per_weight, DIGITS)}
        if self.calibration is not None:
            found["calibrated_on"] = self.calibration.described()
        if self.tuned is not None:
            found["tuned"] = dict(self.tuned)
        if self.evaluation is not None and self.scores is not None:
            found["measured_on"] = self.evaluation.described()
            found["source_perplexity"] = round(self.scores.source.perplexity, DIGITS)
            found |= _figures(self.scores.rounded)
            if self.scores.untuned is not None:
                found["untuned"] = _figures(self.scores.untuned)
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
        if self.tuned is not None:
            held = f"{self.tuned['held_out_kl_before']:.4f} to {self.tuned['held_out_kl']:.4f}"
            end = "" if self.tuned["kept"] else ", no gain: left as it was"
            lines.append(f"  tuned in {self.tuned['steps']} steps: held-out KL {held} nats{end}")
        if self.scores is not None:
            lines += score_lines(self.scores.rounded, self.scores.source)
        return lines


def _figures(score: Score) -> dict[str, float | None]:
    return {
        "perplexity": round(score.perplexity, DIGITS),
        "kl": None if score.kl is None else round(score.kl, DIGITS),
        "top1": None if score.top1 is None else round(score.top1, DIGITS),
    }


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
