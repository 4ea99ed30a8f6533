#!/usr/bin/env python3
"""A model on a card that hardly holds it: contexts, streams, chunks and KV types under a hard cap.

    scripts/bench_memory_sweep.py --checkpoint random:7b-mixed --memory-limit-mb 4096 \\
        --output docs/results/memory_sweep_7b.json

Each KV type with each chunk size is an engine in a process of its own: it starts on an empty card,
and one that dies takes no other's cells with it. A cell is a context and a number of streams that
the memory plan says fit, and last, for each number of streams, the longest context that the plan
predicts: all must run at once without a retry, the pool must be as large as planned, and with one
block more for each stream they must not fit. Every cell's texts are compared with the same prompts
alone. The record is written anew after each cell, so that a sweep cut short leaves what it had.
Exit code 1 where anything crashed, differed or was predicted wrong; cells whose repetitions differ
by more than a tenth of their median are named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench_paged_scheduler import numbers, require_whole
from engine_actor.model.memory import MIB, card_ledger
from engine_runs import EngineRun, Request, add_model_flags, engine_of, switches_of
from memory_use import device_mib
from results import make_record, make_row, percentile, write_record
from same_texts import Comparison, compare, summed
from steady_run import Steady, spread
from sweep_parts import Found, run_part, tell

SPREAD = 0.10
"""How far a repetition may lie from its cell's median."""
TELL_S = 5.0
"""From one telling of the steady run to the next."""
GRID, STEADY = "grid", "steady"
"""The two things that a process of its own may do."""
Part = tuple[str, int, str]
"""KV type, chunk size, and which of the two."""


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser, default="random:7b-mixed")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--memory-limit-mb", type=int, default=4096, help="0: the card's own")
    parser.add_argument("--reserve-memory-mb", type=int, default=384)
    parser.add_argument("--contexts", type=numbers, default=[128, 256, 512], help="tokens")
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4])
    parser.add_argument("--chunk-sizes", type=numbers, default=[32, 128])
    parser.add_argument("--kv-dtypes", nargs="+", default=["auto", "int8"])
    parser.add_argument("--out", type=int, default=32, help="tokens of each text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steady-seconds", type=float, default=480.0, help="one cell, on and on")
    parser.add_argument(
        "--only", choices=[GRID, STEADY], help="the cells, or one of them on and on"
    )
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


@dataclass
class Sweep:
    """All cells of one engine. `wrong`: what must not be; `uneven`: cells that miss the spread."""

    run: EngineRun
    args: argparse.Namespace
    case: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    uneven: list[str] = field(default_factory=list)
    compared: Comparison = field(default_factory=Comparison)
    save: Callable[[], object] = lambda: None

    def go(self) -> None:
        """Every cell that the plan says fits, then its edges."""
        for streams in self.args.concurrency:
            longest = self.longest(streams)
            contexts = [context for context in self.args.contexts if context < longest]
            for context in [*contexts, longest]:
                if context <= self.args.out:
                    self.wrong.append(f"{self.name(longest, streams)}: nothing fits")
                    continue
                self.cell(context, streams)
            self.beyond(longest, streams)

    def longest(self, streams: int) -> int:
        """Tokens that each of so many streams may have: what the plan predicts."""
        facts, block_tokens = self.run.engine.facts, self.run.engine.kv.block_tokens
        return min(facts.max_model_len, facts.kv_blocks // streams * block_tokens)

    def name(self, context: int, streams: int) -> str:
        shown = ", ".join(f"{key} {value}" for key, value in self.case.items())
        return f"{shown}, {streams} x {context} tokens"

    def cell(self, context: int, streams: int) -> None:
        """Repetitions of one cell, and its texts beside the same prompts alone."""
        name, run = self.name(context, streams), self.run
        prompts = [run.prompt(context - self.args.out) for _ in range(streams)]
        before = run.engine.scheduler.stats.preemptions
        rates, tpots = [], []
        if not ran_together(self.texts(prompts)):  # which warms the cell up
            self.wrong.append(f"{name}: waited for memory where the plan says it fits")
        for _ in range(self.args.repeats):
            rate, tpot = self.together(prompts)
            rates.append(rate)
            tpots.append(tpot)
        preempted = run.engine.scheduler.stats.preemptions - before
        if preempted:
            self.wrong.append(f"{name}: {preempted} preemptions where the plan says it fits")
        case = self.case | {"context": context, "streams": streams}
        for metric, unit, values in (
            ("tokens_per_second", "tokens/s", rates),
            ("tpot_p95_s", "s", tpots),
        ):
            row = make_row(case, metric, unit, values, 1)
            self.rows.append(row)
            if spread(values) > SPREAD:
                self.uneven.append(f"{name}: {metric} differs by {spread(values):.0%}")
        self.compare(name, prompts)
        self.save()
        print(f"{name}: {percentile(rates, 0.5):.1f} tokens/s", file=sys.stderr, flush=True)

    def together(self, prompts: Sequence[tuple[int, ...]]) -> tuple[float, float]:
        """(tokens a second of decode, p95 TPOT in seconds) of all prompts at once."""
        requests = self.texts(prompts)
        begun = max(request.times[0] for request in requests)
        end = max(request.times[-1] for request in requests)
        made = sum(time > begun for request in requests for time in request.times)
        return made / (end - begun), percentile([request.tpot for request in requests], 0.95)

    def texts(self, prompts: Sequence[tuple[int, ...]], **sampling: Any) -> list[Request]:
        requests = [self.run.submit(prompt, self.args.out, **sampling) for prompt in prompts]
        self.run.finish()
        require_whole(requests, self.args.out)
        self.run.requests.clear()
        return requests

    def compare(self, name: str, prompts: Sequence[tuple[int, ...]]) -> None:
        """Together against each alone; both with the two best logprobs of every token."""
        together = self.texts(prompts, logprobs=2)
        alone = [self.texts([prompt], logprobs=2)[0] for prompt in prompts]
        for ours, reference in zip(together, alone, strict=True):
            self.compared = compare(self.compared, ours, reference)

    def beyond(self, longest: int, streams: int) -> None:
        """One block more than predicted for each stream must not fit."""
        engine = self.run.engine
        tokens = longest + engine.kv.block_tokens
        before = engine.scheduler.stats.preemptions
        prompt = tokens - self.args.out
        offered = [self.run.offer(prompt, self.args.out) for _ in range(streams)]
        self.run.finish()
        self.run.requests.clear()
        taken = [request for request in offered if request is not None]
        preempted = engine.scheduler.stats.preemptions - before
        fits = len(taken) == streams and ran_together(taken) and not preempted
        if fits and longest < engine.facts.max_model_len:
            self.wrong.append(f"{self.name(tokens, streams)}: fits, the plan says it does not")

    def steady(self) -> None:
        """The largest cell, repeated for the time asked for: no slower and no larger at its end."""
        clock, streams = self.run.clock, max(self.args.concurrency)
        context = min(max(self.args.contexts), self.longest(streams))
        prompts = [self.run.prompt(context - self.args.out) for _ in range(streams)]
        self.texts(prompts)  # which warms the cell up
        case = self.case | {"context": context, "streams": streams, "steady": True}
        begun, told, done = clock(), clock(), Steady()
        while clock() - begun < self.args.steady_seconds:
            rate, tpot = self.together(prompts)
            done.add(clock() - begun, rate, tpot, device_mib(self.run.engine))
            if clock() - told > TELL_S:
                self.rows, told = done.rows(case), clock()
                self.save()
        self.rows = done.rows(case)
        self.wrong += [f"{self.name(context, streams)}: {line}" for line in done.wrong()]

    def memory(self) -> dict[str, int]:
        """What the plan said and what there was, in bytes; `wrong` where they differ."""
        engine = self.run.engine
        plan = engine.facts.memory_plan
        if not plan:
            return {"kv_blocks": engine.facts.kv_blocks}
        shown = ", ".join(f"{key} {value}" for key, value in self.case.items())
        if engine.facts.kv_blocks != plan["kv_blocks"]:
            self.wrong.append(
                f"{shown}: {engine.facts.kv_blocks} blocks, planned were {plan['kv_blocks']}"
            )
        retries = int(engine.metrics.value("oom_retries_total"))
        if retries:
            self.wrong.append(f"{shown}: memory ran out {retries} times")
        peak = torch.cuda.max_memory_allocated() + card_ledger(torch.device("cuda")).mapped
        print(f"{shown}: peak {peak / MIB:.0f} of {plan['allowance'] / MIB:.0f} MiB", flush=True)
        return {"kv_blocks": engine.facts.kv_blocks, "allowance": plan["allowance"], "peak": peak}


def ran_together(requests: Sequence[Request]) -> bool:
    """Whether the last of them had its first token before any had its last."""
    return max(each.times[0] for each in requests) <= min(each.times[-1] for each in requests)


def settings_of_cell(args: argparse.Namespace, kv_dtype: str, chunk: int) -> dict[str, Any]:
    """The engine's settings; no prefix cache, which would answer for a repeated prompt."""
    return {
        "memory_limit_mb": args.memory_limit_mb or None,
        "reserve_memory_mb": args.reserve_memory_mb,
        "prefill_chunk_tokens": chunk,
        "max_num_seqs": max(args.concurrency),
        "max_partial_prefills": max(args.concurrency),
        "kv": {"dtype": kv_dtype, "prefix_cache": False},
    }


def measure(args: argparse.Namespace, part: Part, path: Path | None = None) -> Found:
    """One engine's cells, here; told to `path` as they come. Raises whatever ends it."""
    dtype, chunk, what = part
    engine = engine_of(args, settings_of_cell(args, dtype, chunk))
    sweep = Sweep(EngineRun(engine), args, {"kv": dtype, "chunk": chunk})

    def found(memory: dict[str, int] | None) -> Found:
        return {
            "rows": sweep.rows,
            "wrong": sweep.wrong,
            "uneven": sweep.uneven,
            "memory": memory,
            "texts": sweep.compared.as_dict(),
            "switches": switches_of(args, engine),
        }

    if path is not None:
        sweep.save = lambda: tell(found(None), path)
    sweep.go() if what == GRID else sweep.steady()
    return found(sweep.memory())


def parts_of(args: argparse.Namespace) -> list[Part]:
    """All engines, and the last one's settings once more for the steady run."""
    grid = [(dtype, chunk, GRID) for dtype in args.kv_dtypes for chunk in args.chunk_sizes]
    steady = [(*grid[-1][:2], STEADY)] if args.steady_seconds > 0 else []
    return [part for part in grid + steady if args.only in (None, part[2])]


def record_of(args: argparse.Namespace, measured: Mapping[Part, Found], whole: bool) -> Found:
    """The record of what is known by now. `whole`: no part is to come."""
    every = list(measured.values())
    texts = summed([each["texts"] for each in every if "texts" in each])
    switches = {
        **next((each["switches"] for each in reversed(every) if "switches" in each), {}),
        "memory": {" ".join(map(str, part)): each.get("memory") for part, each in measured.items()},
        "texts": texts.as_dict(),
        "wrong": [line for each in every for line in each["wrong"]] + texts.wrong(),
        "uneven": [line for each in every for line in each.get("uneven", ())],
        "whole": whole,
    }
    rows = [row for each in every for row in each.get("rows", ())]
    return make_record("memory_sweep", switches, rows, args.note)


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep, print, write; 1 where something is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    if args.part is not None:
        dtype, chunk, what = args.part
        tell(measure(args, (dtype, int(chunk), what), args.output), args.output)
        return 0
    measured: dict[Part, Found] = {}
    parts = parts_of(args)

    def keep(found: Found, part: Part, whole: bool = False) -> None:
        measured[part] = found
        record = record_of(args, measured, whole)
        if record["rows"]:
            write_record(record, args.output)

    for part in parts:
        words = [sys.executable, __file__, *argv, "--part", *map(str, part)]
        name = "kv {}, chunk {}, {}".format(*part)
        found = run_part(words, name, lambda found, part=part: keep(found, part))
        keep(found, part, part == parts[-1])
    said = record_of(args, measured, True)["switches"]
    texts = said["texts"]
    same = texts["texts"] - texts["excused"]
    print(f"{same} of {texts['texts']} texts equal those alone, {texts['excused']} near ties")
    print("\n".join([*said["uneven"], *(f"WRONG {line}" for line in said["wrong"])]))
    return int(bool(said["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
