#!/usr/bin/env python3
"""A long prompt comes into running streams, in each of the five ways to share the card.

    scripts/bench_insertion.py --output docs/results/insertion_3b_h200.json

One engine holds all five ways; the policy that chooses among them is replaced from case to case, so
weights, kernels and graphs are the same. A run is one insertion as in bench_tpot_jitter.py: streams
decode, the prompt is submitted, and until its first token every time between two tokens of a stream
counts. --chunks by --modes, and --also MODE:CHUNK[:CTAS[:SLICE]] for single cases.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench_tpot_jitter import ALL_COUNTERS, METRICS, VLLM, alone, insertion
from configs.schema import EngineConfig
from engine_actor.core.overlap_policy import FixedPolicy, Sharing
from engine_actor.core.plan import OverlapMode
from engine_actor.engine import Engine
from engine_actor.work.sharing import SharedDevice
from engine_runs import EngineRun, add_model_flags, engine_of, switches_of
from results import make_record, make_row, percentile, write_record

MODES = tuple(mode.value for mode in OverlapMode)
MS = 1e3


@dataclass(frozen=True)
class Case:
    """One way to take the prompt in. max_ctas: None for the engine's own."""

    mode: str
    chunk_tokens: int
    max_ctas: int | None = None
    slice_tokens: int | None = None


def case_of(text: str) -> Case:
    """MODE:CHUNK[:CTAS[:SLICE]], an empty part for none."""
    mode, chunk, *rest = text.split(":")
    numbers = [int(part) if part else None for part in rest]
    return Case(mode, int(chunk), *numbers)


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser, "random:3b")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--chunks", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--also", type=case_of, nargs="*", default=[], help=case_of.__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--short-tokens", type=int, default=512, help="of the streams' prompts")
    parser.add_argument("--lead-tokens", type=int, default=24, help="of each stream, undisturbed")
    parser.add_argument("--phrase-tokens", type=int, default=8000, help="the long prompt")
    parser.add_argument("--long-repeat", type=int, default=1, help="the phrase, so many times")
    parser.add_argument("--max-new-tokens", type=int, default=2, help="after the long prompt")
    parser.add_argument("--max-cache", type=int, default=8192, help="context limit")
    parser.add_argument(
        "--alone", action="store_true", help="its first token on an idle engine too"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="insertions thrown away")
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def build(args: argparse.Namespace) -> Engine:
    """An engine that has every way to share the card, green contexts too where it can."""
    settings: dict[str, Any] = {
        "max_num_seqs": args.streams + 1,
        "prefill_chunk_tokens": max(case.chunk_tokens for case in cases_of(args)),
        "max_partial_prefills": 1,
        "overlap_mode": "green",
        "kv": {"prefix_cache": False},
    }
    return engine_of(args, settings, max_model_len=args.max_cache)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """The grid, then the single ones."""
    grid = [Case(mode, chunk) for mode in args.modes for chunk in args.chunks]
    return [*grid, *args.also]


def use(engine: Engine, case: Case) -> bool:
    """Switch the engine to a case; False where it cannot."""
    mode = OverlapMode(case.mode)
    assert isinstance(engine.pair, SharedDevice)
    if mode not in engine.pair.modes:
        return False
    own = engine.pair.limit_of(mode)
    engine.policy = FixedPolicy(Sharing(mode, case.max_ctas or own))
    changes: dict[str, Any] = {"prefill_chunk_tokens": case.chunk_tokens}
    if "prefill_slice_tokens" in EngineConfig.model_fields:
        changes["prefill_slice_tokens"] = case.slice_tokens
    engine.scheduler.limits = replace(engine.scheduler.limits, **changes)
    return True


def measure(engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases and repetitions."""
    run, rows = EngineRun(engine), []
    for case in cases_of(args):
        if not use(engine, case):
            print(f"{case.mode}: not on this card", file=sys.stderr, flush=True)
            continue
        found = []
        for _ in range(args.warmup + args.repeats):
            idle = {"ttft_alone_s": alone(run, args)} if args.alone else {}
            found.append(idle | insertion(run, args))
        kept = found[args.warmup :]
        for metric, unit in (METRICS | dict.fromkeys(ALL_COUNTERS, "steps")).items():
            if metric in kept[0]:
                raw = [each[metric] for each in kept]
                rows.append(make_row(asdict(case), metric, unit, raw, args.warmup))
        print(line(case, kept), flush=True)
    return rows


def line(case: Case, runs: Sequence[dict[str, Any]]) -> str:
    """Medians over the repetitions, and the worst ITL of all."""

    def of(metric: str) -> float:
        return MS * percentile([run[metric] for run in runs], 0.5)

    name = f"{case.mode}:{case.chunk_tokens}:{case.max_ctas or ''}:{case.slice_tokens or ''}"
    worst = MS * max(run["max_itl_s"] for run in runs)
    return (
        f"{name:34s} ITL p50 {of('itl_p50_s'):6.2f} p99 {of('itl_p99_s'):6.2f} "
        f"max {of('max_itl_s'):6.2f} (worst {worst:6.2f})  TTFT {of('ttft_s'):6.1f}  "
        f"p95 TPOT {of('tpot_p95_s'):5.2f}  "
        f"before {of('undisturbed_itl_p50_s'):.2f} ms"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = build_parser().parse_args(argv)
    engine = build(args)
    print(f"green: {engine.pair.reason or engine.pair.max_ctas}", flush=True)
    rows = measure(engine, args)
    switches = switches_of(args, engine) | {"also": [asdict(case) for case in args.also]}
    write_record(make_record("insertion", switches, rows, [*args.note, VLLM]), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
