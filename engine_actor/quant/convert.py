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
from engine_actor.quant.evaluate import Finished, Score, embed, run_checkpoint, score
from engine_actor.quant.forward import LayerForward
from engine_actor.quant.journal import Journal, at_work
from engine_actor.quant.layer_pass import LayerPass
from engine_actor.quant.plan import make_plan
from engine_actor.quant.program import program
from engine_actor.quant.recipe import Recipe
from engine_actor.quant.report import FILE, Report, Scores
from engine_actor.quant.rounding import round_table
from engine_actor.quant.stored_layer import packed_linears, stored_tensors
from engine_actor.quant.stream import LINEARS, LayerReader, as_matrix
from engine_actor.quant.texts import TokenRows
from engine_actor.quant.tune import Tuning
from engine_actor.quant.tune_model import Rounding, dense_layer, tune_rounded


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """source: what to convert; name: how the report calls it. evaluation None: measure nothing.

    reference: what `run_checkpoint` gave for source and evaluation, where the caller has it.
    tuning: how the rounded model is tuned as a whole, None not at all.
    """

    source: Checkpoint
    name: str
    recipe: Recipe
    calibration: TokenRows
    evaluation: TokenRows | None
    device: torch.device
    reference: Finished | None = None
    tuning: Tuning | None = None


def convert(job: Job, target: Path, progress: Progress, resume: bool = False) -> Report:
    """Write `target`, whole or not at all. Raises CheckpointError with one line.

    A killed run leaves `target` as it was and its finished layers beside it; with `resume` the same
    job goes on there and gives the same bytes as an undisturbed one. Two at once are refused.
    """
    with at_work(target):
        journal = Journal(target, _settings(job), resume)
        run = _Run(job, journal)
        run.round_layers(progress)
        run.tune(progress)
        report = run.report(run.scores(progress))
        _write(job, run, report, target)
    journal.remove()
    return report


def _write(job: Job, run: _Run, report: Report, target: Path) -> None:
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


def _settings(job: Job) -> dict[str, Any]:
    """All that decides the bytes; a run can only be resumed by one with the same."""
    return {
        "source": job.source.fingerprint,
        "recipe": job.recipe.described(),
        "calibration text": job.calibration.described(),
        "evaluation text": None if job.evaluation is None else job.evaluation.described(),
        "tuning": None if job.tuning is None else job.tuning.described(),
        "program": program(),
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
            self._round_layer(index)
        progress("layers", total, total)

    def _round_layer(self, index: int) -> None:
        """The next layer, into the journal; the texts behind it."""
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
        self._journal.finish(stored_tensors(packed, weights.norms), self._tracks, entry)

    def _embedded(self) -> dict[str, torch.Tensor]:
        """Both texts before layer 0, by the rounded embedding."""
        tracks = {}
        if self._job.recipe.method.needs_inputs:
            tracks["calibration"] = embed(self._table, self._job.calibration.tokens)
        if self._job.evaluation is not None:
            tracks["evaluation"] = embed(self._table, self._job.evaluation.tokens)
        return tracks

    def tune(self, progress: Progress) -> None:
        """The rounded model as a whole, where that is wanted and not done yet."""
        job, journal = self._job, self._journal
        if job.tuning is None or journal.tuned is not None:
            return
        rounding = Rounding(job.source, self._reader, job.device, self._table, self._head())
        layers = [self._packed(index) for index in range(self._config.n_layers)]
        result = tune_rounded(rounding, layers, job.tuning, journal.folder, progress)
        journal.keep_tuned(result.layers, result.norm, result.described())

    @torch.inference_mode()
    def scores(self, progress: Progress) -> Scores | None:
        """What the evaluation text says; None without one."""
        job = self._job
        if job.evaluation is None:
            return None
        tokens, used = job.evaluation.tokens, job.source.usable_vocab_size()
        progress("measure", 0, 0)
        reference = job.reference or run_checkpoint(job.source, tokens, job.device, progress)

        def measured(hidden: torch.Tensor, norm: torch.Tensor) -> Score:
            normed = self._forward.norm(hidden, norm.to(hidden.device))
            return score(Finished(normed, self._head()), reference, tokens, used, job.device)

        source = score(reference, None, tokens, used, job.device)
        rounded = measured(self._tracks["evaluation"], self._source_norm())
        if self._journal.tuned is None:
            return Scores(source, rounded, None)
        hidden = embed(self._table, tokens)
        for index in range(self._config.n_layers):
            packed, norms = self._packed(index)
            self._pass.advance(hidden, dense_layer(packed, norms, job.device))
        return Scores(source, measured(hidden, self._norm()), rounded)

    def _packed(self, index: int) -> tuple[dict[str, PackedLinear], dict[str, torch.Tensor]]:
        """(linears, norms) of a finished layer by short names, on the CPU."""
        tensors, grids = self._journal.layer(index), self._journal.finished[index]["grids"]
        norms = {name: tensor for name, tensor in tensors.items() if "." not in name}
        return packed_linears(tensors, grids, self._config), norms

    def _norm(self) -> torch.Tensor:
        return self._source_norm() if self._journal.tuned is None else self._journal.tuned_norm()

    def _source_norm(self) -> torch.Tensor:
        norm = self._reader.top("norm")
        assert isinstance(norm, torch.Tensor)
        return norm

    def _head(self) -> PackedLinear:
        if self._config.tie_embeddings:
            return self._table
        return self._rounded_table("head")

    def _rounded_table(self, name: str) -> PackedLinear:
        try:
            table, job = _stored(self._reader.top(name)), self._job
            return round_table(table, job.recipe.table(name), job.device)
        except ValueError as error:
            raise refusal(name, str(error)) from None

    def report(self, scores: Scores | None) -> Report:
        """What was measured."""
        job = self._job
        return Report(
            job.recipe.described(),
            make_plan(self._config, job.recipe),
            [entry["errors"] for entry in self._journal.finished],
            job.calibration if job.recipe.method.needs_inputs else None,
            job.evaluation,
            scores,
            self._journal.tuned,
        )

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Everything the folder holds, in forward order, a layer at a time."""
        yield "embed", self._table
        for index in range(self._config.n_layers):
            packed, norms = self._packed(index)
            at = f"layers.{index}."
            for name in sorted(norms):
                yield at + name, norms[name]
            for short in LINEARS:
                yield at + short, packed[short]
        yield "norm", self._norm()
        if not self._config.tie_embeddings:
            yield "head", self._head()


def _stored(weight: Weight) -> torch.Tensor:
    """A table as a matrix: in its own dtype where it is dense, since it may be huge."""
    dense = getattr(weight, "weight", None)
    return dense if isinstance(dense, torch.Tensor) else as_matrix(weight)
