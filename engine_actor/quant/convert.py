"""A checkpoint to our packed folder by a recipe: one layer in memory at a time, resumable, atomic.

Puts the pieces in order (stream, layer_pass, journal, writer); each step is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_actor.load.checkpoint import Checkpoint
from engine_actor.load.formats.base import Weight
from engine_actor.load.progress import Progress
from engine_actor.load.refusal import refusal
from engine_actor.load.writer import atomic_folder, write_json, write_packed
from engine_actor.ops import PackedLinear
from engine_actor.quant.companions import source_config, write_companions
from engine_actor.quant.evaluate import Finished, Score, embed, finish, run_checkpoint, score
from engine_actor.quant.forward import LayerForward
from engine_actor.quant.journal import Journal
from engine_actor.quant.layer_pass import LayerPass
from engine_actor.quant.plan import make_plan
from engine_actor.quant.recipe import Recipe
from engine_actor.quant.report import FILE, Report
from engine_actor.quant.rounding import round_table
from engine_actor.quant.stream import LINEARS, LayerReader, LayerWeights, as_matrix
from engine_actor.quant.texts import TokenRows

FIELDS = ("qweight", "scales", "offsets", "zeros", "bias")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """source: what to convert; name: how the report calls it. evaluation None: measure nothing.

    reference: what `run_checkpoint` gave for source and evaluation, where the caller has it.
    """

    source: Checkpoint
    name: str
    recipe: Recipe
    calibration: TokenRows
    evaluation: TokenRows | None
    device: torch.device
    reference: Finished | None = None


def convert(job: Job, target: Path, progress: Progress, resume: bool = False) -> Report:
    """Write `target`, whole or not at all. Raises CheckpointError with one line.

    A killed run leaves `target` as it was and its finished layers beside it; with `resume` the same
    job goes on there and gives the same bytes as an undisturbed one.
    """
    journal = Journal(target, _settings(job), resume)
    run = _Run(job, journal)
    run.round_layers(progress)
    scores = run.scores(progress)
    report = run.report(*scores)
    with atomic_folder(target) as folder:
        source = {
            "name": job.name,
            "format": job.source.quantisation.format,
            "fingerprint": job.source.fingerprint,
            "recipe": job.recipe.described(),
            "report": report.summary(),
        }
        write_packed(folder, source_config(job.source), run.weights(), source)
        write_json(folder / FILE, report.document())
        write_companions(job.source, folder)
    journal.remove()
    return report


def _settings(job: Job) -> dict[str, Any]:
    """All that decides the bytes; a run can only be resumed by one with the same."""
    return {
        "source": job.source.fingerprint,
        "recipe": job.recipe.described(),
        "calibration text": job.calibration.described(),
        "evaluation text": None if job.evaluation is None else job.evaluation.described(),
        "device": job.device.type,
        "number of threads": torch.get_num_threads() if job.device.type == "cpu" else 0,
    }


class _Run:
    """The state of one conversion."""

    def __init__(self, job: Job, journal: Journal) -> None:
        self._job = job
        self._journal = journal
        self._config = job.source.config
        self._reader = LayerReader(job.source, job.device)
        self._table = self._rounded_table("embed")
        length = job.calibration.tokens.shape[1]
        self._forward = LayerForward(self._config, length, job.device)
        self._pass = LayerPass(self._forward, job.recipe.method, job.device)
        self._tracks: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def round_layers(self, progress: Progress) -> None:
        """Every layer the journal does not have yet."""
        total = self._config.n_layers
        done = len(self._journal.finished)
        self._tracks = self._journal.tracks() if done else self._embedded()
        for index in range(done, total):
            progress("layers", index, total)
            weights = self._reader.layer(index)
            grids = {short: self._job.recipe.grid(index, short) for short in LINEARS}
            try:
                packed, now, errors = self._pass.round_layer(
                    weights, grids, self._tracks.get("calibration")
                )
            except ValueError as error:  # finite weights whose activations are not
                raise refusal(f"layers.{index}", str(error)) from None
            if "evaluation" in self._tracks:
                self._pass.advance(self._tracks["evaluation"], now)
            entry = {"errors": errors, "grids": {s: [g.bits, g.group] for s, g in grids.items()}}
            self._journal.finish(_flat(packed, weights), self._tracks, entry)
        progress("layers", total, total)

    def _embedded(self) -> dict[str, torch.Tensor]:
        """Both texts before layer 0, by the rounded embedding."""
        tracks = {}
        if self._job.recipe.method.needs_inputs:
            tracks["calibration"] = embed(self._table, self._job.calibration.tokens)
        if self._job.evaluation is not None:
            tracks["evaluation"] = embed(self._table, self._job.evaluation.tokens)
        return tracks

    @torch.inference_mode()
    def scores(self, progress: Progress) -> tuple[Score | None, Score | None]:
        """(source, rounded) on the evaluation text."""
        job = self._job
        if job.evaluation is None:
            return None, None
        tokens = job.evaluation.tokens
        progress("measure", 0, 0)
        reference = job.reference or run_checkpoint(job.source, tokens, job.device, progress)
        rounded = finish(self._tracks["evaluation"], self._reader, self._forward, self._head())
        used = job.source.usable_vocab_size()
        source = score(reference, None, tokens, used, job.device)
        return source, score(rounded, reference, tokens, used, job.device)

    def _head(self) -> PackedLinear:
        if self._config.tie_embeddings:
            return self._table
        return self._rounded_table("head")

    def _rounded_table(self, name: str) -> PackedLinear:
        try:
            return round_table(_stored(self._reader.top(name)), self._job.recipe.embedding)
        except ValueError as error:
            raise refusal(name, str(error)) from None

    def report(self, source: Score | None, rounded: Score | None) -> Report:
        """What was measured."""
        job = self._job
        return Report(
            job.recipe.described(),
            make_plan(self._config, job.recipe),
            [entry["errors"] for entry in self._journal.finished],
            job.calibration if job.recipe.method.needs_inputs else None,
            job.evaluation,
            source,
            rounded,
        )

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Everything the folder holds, in forward order, a layer at a time."""
        yield "embed", self._table
        for index, entry in enumerate(self._journal.finished):
            tensors = self._journal.layer(index)
            at = f"layers.{index}."
            for name in sorted(n for n in tensors if "." not in n):
                yield at + name, tensors[name]
            for short in LINEARS:
                bits, group = entry["grids"][short]
                yield at + short, _unflat(tensors, short, bits, group, self._width(short))
        norm = self._reader.top("norm")
        yield "norm", norm
        if not self._config.tie_embeddings:
            yield "head", self._head()

    def _width(self, short: str) -> int:
        """K of a linear."""
        config = self._config
        if short == "o":
            return config.n_heads * config.head_dim
        return config.intermediate if short == "down" else config.hidden


def _stored(weight: Weight) -> torch.Tensor:
    """A table as a matrix: in its own dtype where it is dense, since it may be huge."""
    dense = getattr(weight, "weight", None)
    return dense if isinstance(dense, torch.Tensor) else as_matrix(weight)


def _flat(packed: dict[str, PackedLinear], weights: LayerWeights) -> dict[str, torch.Tensor]:
    """A layer as named tensors: `qkv.scales`, ..., and norms by their short names."""
    tensors = {name: norm.cpu() for name, norm in weights.norms.items()}
    for short, linear in packed.items():
        for name in FIELDS:
            tensor = getattr(linear, name)
            if tensor is not None:
                tensors[f"{short}.{name}"] = tensor
    return tensors


def _unflat(
    tensors: dict[str, torch.Tensor], short: str, bits: int, group: int, columns: int
) -> PackedLinear:
    fields = {name: tensors.get(f"{short}.{name}") for name in FIELDS}
    qweight, scales = fields.pop("qweight"), fields.pop("scales")
    assert qweight is not None
    assert scales is not None
    return PackedLinear(bits, group, columns, qweight, scales, **fields)
