#!/usr/bin/env python3
"""Quality against bytes: convert a model by several recipes, measure each on the same texts.

    scripts/bench_quality.py --calibration handbook.txt --text faq.txt --text tutorial.txt \\
        --work /tmp/quality --output quality.json w4:64 w3:64 mixed:64 auto=w3:64 w4:64:rtn

A case is RECIPE:GROUP[:METHOD][:offsets], or auto=RECIPE:GROUP, `auto` within the bytes of that
recipe's layers. METHOD tuned or scales gives two lines: before and after tuning. Texts are cut in
rows of 512 tokens, the same number from each. KL in nats over the whole vocabulary, source ||
converted, mean over all positions but a row's last. A case already in --work is not converted
again, so that a long bench may be stopped and gone on with. --other measures a checkpoint of the
same source that somebody else made; its bits are those of its file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from configs.load import cache_dir
from engine_actor.load.checkpoint import Checkpoint, open_checkpoint
from engine_actor.load.source import resolve
from engine_actor.quant.auto import auto_recipe, sensitivities
from engine_actor.quant.convert import Job, convert
from engine_actor.quant.evaluate import Finished, run_checkpoint, score
from engine_actor.quant.plan import layer_weights, make_plan
from engine_actor.quant.progress import TimedProgress
from engine_actor.quant.recipe import Method, Recipe, fixed_recipe
from engine_actor.quant.report import FILE
from engine_actor.quant.texts import TUNING_ROWS, TokenRows, token_rows
from engine_actor.quant.tune import Tuning
from results import make_record, make_row, write_record

METHODS = {
    "": Method(),
    "rtn": Method(rounding="nearest", search="none"),
    "mse": Method(rounding="nearest", search="mse"),
    "activation": Method(rounding="nearest", search="activation"),
    "gptq": Method(search="activation", rounds=0),
    "curvature": Method(search="curvature", rounds=1),
    "tuned": Method(),
    "scales": Method(),
}
"""rtn: absmax rounding. gptq: the plain one, act-order with static groups. curvature: with the
search by what GPTQ leaves. "": what we ship, untuned. tuned: and then tuned as a whole; scales: the
same with its codes left alone.
"""
METRICS = (("kl", "nats"), ("perplexity", ""), ("top1", "share"), ("bits_per_weight", "bits"))


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    recipe: str
    group: int
    method: str
    offsets: bool

    @staticmethod
    def parse(text: str) -> Case:
        """See the module's docstring. Raises ValueError."""
        head, *rest = text.split(":")
        if not rest or not rest[0].isdigit() or not set(rest[1:]) <= {*METHODS, "offsets"}:
            raise ValueError(f"case {text!r} is not RECIPE:GROUP[:METHOD][:offsets]")
        methods = [word for word in rest[1:] if word != "offsets"]
        return Case(text, head, int(rest[0]), methods[0] if methods else "", "offsets" in rest[1:])


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", type=Case.parse)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--calibration-rows", type=int, default=24)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--rows", type=int, default=8, help="rows of each text")
    parser.add_argument("--tune-steps", type=int, default=300)
    parser.add_argument("--tune-rows", type=int, default=TUNING_ROWS)
    parser.add_argument("--tune-batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--other", type=_named_path, action="append", default=[], metavar="NAME=PATH"
    )
    parser.add_argument("--note", action="append", default=[])
    parser.add_argument(
        "--quoted", type=Path, help="figures of another run: JSON with res: [{name, bpw, ppl, kl}]"
    )
    return parser


def _named_path(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, Path(path)


class Bench:
    """A source, its texts, and its answers, computed once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._device = torch.device(options.device)
        self._source: Checkpoint = open_checkpoint(resolve(options.model, cache_dir()))
        folder = self._source.folder
        most = max(options.calibration_rows, options.tune_rows)
        text = token_rows(options.calibration, "jargon", folder, most)
        self._calibration = TokenRows(text.name, text.tokens[: options.calibration_rows])
        self._tuning = TokenRows(text.name, text.tokens[: options.tune_rows])
        parts = [token_rows(path, "", folder, options.rows) for path in options.text]
        name = " + ".join(part.name for part in parts)
        self._evaluation = TokenRows(name, torch.cat([part.tokens for part in parts]))
        self._reference: Finished | None = None

    def run(self, case: Case) -> dict[str, Any]:
        """The summary of one case, and what it cost."""
        target = self._options.work / case.name.replace(":", "_").replace("=", "_")
        cost = target.with_suffix(".cost.json")
        if not target.is_dir():
            self._answers()
            began, cpu = time.monotonic(), time.process_time()
            convert(self._job(case, target), target, TimedProgress(case.name), resume=True)
            spent = {"wall": time.monotonic() - began, "cpu": time.process_time() - cpu}
            cost.write_text(json.dumps(spent), encoding="utf-8")
        report = json.loads((target / FILE).read_text(encoding="utf-8"))["report"]
        return {**report, "cost": json.loads(cost.read_text("utf-8")) if cost.is_file() else {}}

    def measure(self, name: str, path: Path) -> list[dict[str, Any]]:
        """Rows of a checkpoint that is there already."""
        other, tokens = open_checkpoint(path), self._evaluation.tokens
        finished = run_checkpoint(other, tokens, self._device, TimedProgress(name))
        used = self._source.usable_vocab_size()
        found = score(finished, self._answers(), tokens, used, self._device)
        linears = [
            e for e in other.entries if e.name.startswith("layers.") and "norm" not in e.name
        ]
        bits = 8 * sum(entry.nbytes for entry in linears) / layer_weights(other.config)
        described = {"case": name, "recipe": "", "method": "as it came"}
        figures = {"kl": found.kl, "perplexity": found.perplexity, "top1": found.top1}
        figures["bits_per_weight"] = bits
        return [make_row(described, m, unit, [figures[m]], 0) for m, unit in METRICS]

    def _answers(self) -> Finished:
        """The source's, computed once."""
        if self._reference is None:
            progress, tokens = TimedProgress("source"), self._evaluation.tokens
            self._reference = run_checkpoint(self._source, tokens, self._device, progress)
        return self._reference

    def _job(self, case: Case, target: Path) -> Job:
        return Job(
            self._source,
            self._options.model,
            self._recipe(case, target),
            self._calibration,
            self._evaluation,
            self._device,
            self._reference,
            self._tuning_of(case),
        )

    def _tuning_of(self, case: Case) -> Tuning | None:
        if case.method not in ("tuned", "scales"):
            return None
        options, codes = self._options, case.method == "tuned"
        return Tuning(self._tuning, options.tune_steps, codes, options.tune_batch)

    def _recipe(self, case: Case, target: Path) -> Recipe:
        if not case.recipe.startswith("auto="):
            recipe = fixed_recipe(case.recipe, case.group, case.offsets)
            return replace(recipe, method=METHODS[case.method])
        like = fixed_recipe(case.recipe.removeprefix("auto="), case.group)
        budget = make_plan(self._source.config, like).layers
        found = sensitivities(
            self._source, self._calibration, target, self._device, TimedProgress(case.name)
        )
        return replace(auto_recipe(found, budget, like), method=METHODS[case.method])


def lines_of(case: Case, report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """(name, method) -> figures: one line, or for a tuned case that before tuning too."""
    lines = {}
    if "untuned" in report:
        name = ":".join(word for word in case.name.split(":") if word != case.method)
        lines[name, "ours"] = {**report, **report["untuned"], "cost": {}}
    lines[case.name, case.method or "ours"] = report
    return lines


def rows_of(case: Case, report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a metric and line."""
    rows = []
    for (name, method), found in lines_of(case, report).items():
        described = {
            "case": name,
            "recipe": case.recipe,
            "group": case.group,
            "method": method,
            "offsets": case.offsets,
        }
        rows += [make_row(described, m, unit, [found[m]], 0) for m, unit in METRICS]
        growth = found["perplexity"] / found["source_perplexity"] - 1
        rows.append(make_row(described, "perplexity_growth", "share", [growth], 0))
        for kind in ("cpu", "wall"):
            if kind in found["cost"]:
                rows.append(make_row(described, f"convert_{kind}", "s", [found["cost"][kind]], 0))
    return rows


def quoted_rows(path: Path) -> list[dict[str, Any]]:
    """Figures of another run, labelled as such; its texts may be others."""
    rows = []
    for found in json.loads(path.read_text(encoding="utf-8"))["res"]:
        described = {"case": found["name"], "recipe": "", "method": "plain GPTQ, other run"}
        for metric, key in (("kl", "kl"), ("perplexity", "ppl"), ("bits_per_weight", "bpw")):
            rows.append(make_row(described, metric, "", [found[key]], 0))
    return rows


def table(reports: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| case | bits a weight | KL | perplexity | same first choice |",
        "|---|---|---|---|---|",
    ]
    for name, report in reports.items():
        growth = 100 * (report["perplexity"] / report["source_perplexity"] - 1)
        lines.append(
            f"| {name} | {report['bits_per_weight']:.3f} | {report['kl']:.4f} | "
            f"{report['perplexity']:.2f} ({growth:+.1f} %) | {100 * report['top1']:.1f} % |"
        )
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """A switch without the folders of the machine it was given on."""
    if isinstance(value, list):
        return " ".join(_shown(part) for part in value)
    return Path(value).name if isinstance(value, Path) or "/" in str(value) else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Measure every case; the record is written after each, so that a stop loses nothing."""
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    hidden = ("cases", "other", "note", "work", "output")
    switches = {k: _shown(v) for k, v in vars(options).items() if k not in hidden}
    reports: dict[str, dict[str, Any]] = {}
    rows = [] if options.quoted is None else quoted_rows(options.quoted)
    for name, path in options.other:
        rows += bench.measure(name, path)
        write_record(make_record("quality", switches, rows, options.note), options.output)
    for case in options.cases:
        report = bench.run(case)
        reports |= {name: found for (name, _), found in lines_of(case, report).items()}
        rows += rows_of(case, report)
        write_record(make_record("quality", switches, rows, options.note), options.output)
        print(table(reports), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
