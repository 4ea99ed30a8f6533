#!/usr/bin/env python3
"""Requests at once through the paged scheduler, with the seed's flags and fields (section 10.3).

    scripts/bench_paged_scheduler.py --checkpoint random:3b --backend w4a16 --max-new-tokens 16 \\
        --max-cache 128 --prefill-chunk-tokens 32 --concurrency 1,2,4 --reserve-memory-mb 384 \\
        --no-prefix-cache --output docs/results/paged_concurrency_3b_tiled_overlap.json

All requests of a run are submitted at once, each prompt one chunk long: while one decodes, the next
prefills. A run is one repetition at one concurrency. --no-prefill-decode-overlap is the twin.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_actor.engine import Engine
from engine_actor.messages import Flag
from engine_runs import BenchError, EngineRun, Request, add_model_flags, engine_of, switches_of
from results import make_record, make_row, percentile, write_record

COUNTERS = (
    "prefill_steps_total",
    "prefill_decode_overlap_steps",
    "prefill_decode_stream_overlap_steps",
)
METRICS = {
    "tokens_per_second": "tokens/s",
    "ttft_p50_s": "s",
    "ttft_p95_s": "s",
    "tpot_p50_s": "s",
    "tpot_p95_s": "s",
    "inter_token_jitter_s": "s",
    "max_itl_s": "s",
}
"""What a run measures, and its unit. Jitter: p95 minus p50 of the times between tokens."""
SEED = {
    1: (8.592, 11.153, 11.189),
    2: (12.227, 16.481, 17.484),
    4: (14.736, 22.604, 22.779),
}
"""Concurrency -> the seed's tokens/s: fallback GEMM, tiled without and with overlap (RTX 3050)."""


def build_parser() -> argparse.ArgumentParser:
    """The seed's flags, and what makes a result of ours; all end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser)
    add_seed_flags(parser)
    parser.add_argument("--prefill-chunk-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4], help="as in 1,2,4")
    parser.add_argument("--prompt-tokens", type=int, default=24, help="of each request")
    parser.add_argument(
        "--max-partial-prefills", type=int, default=1, help="prompts in prefill at once (1: seed)"
    )
    return parser


def add_seed_flags(parser: argparse.ArgumentParser) -> None:
    """What both of the seed's scheduler benches take."""
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--max-cache", type=int, default=128, help="most tokens of a sequence")
    parser.add_argument("--reserve-memory-mb", type=int, default=384)
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--no-prefill-decode-overlap", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="repetitions thrown away")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--note", action="append", default=[], help="kept in the result")


def numbers(text: str) -> list[int]:
    """`1,2,4`."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(f"{text}: all must be at least 1")
    return found


def seed_settings(args: argparse.Namespace, sequences: int) -> dict[str, Any]:
    """The engine's settings behind the flags of both benches, for so many sequences at once."""
    return {
        "max_num_seqs": sequences,
        "reserve_memory_mb": args.reserve_memory_mb,
        "enable_prefill_decode_overlap": not args.no_prefill_decode_overlap,
        "kv": {"prefix_cache": not args.no_prefix_cache},
    }


def build(args: argparse.Namespace) -> Engine:
    """The engine of these flags. Raises BenchError where a request does not fit --max-cache."""
    needed = args.prompt_tokens + args.max_new_tokens
    if needed > args.max_cache:
        raise BenchError(f"--max-cache {args.max_cache}: a request needs {needed} tokens")
    settings = seed_settings(args, max(args.concurrency)) | {
        "prefill_chunk_tokens": args.prefill_chunk_tokens,
        "max_partial_prefills": args.max_partial_prefills,
    }
    return engine_of(args, settings, max_model_len=args.max_cache)


def one_run(run: EngineRun, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """All requests at once, to their ends."""
    before = run.counters(*COUNTERS)
    started = run.clock()
    requests = [run.submit(args.prompt_tokens, args.max_new_tokens) for _ in range(concurrency)]
    run.finish()
    seconds = run.clock() - started
    require_whole(requests, args.max_new_tokens)
    after = run.counters(*COUNTERS)
    found = measured(requests, seconds) | {name: after[name] - before[name] for name in COUNTERS}
    run.requests.clear()
    return found


def require_whole(requests: Sequence[Request], tokens: int) -> None:
    """Raise BenchError unless every request ended by its length with all of its tokens."""
    for request in requests:
        if request.end is not Flag.LENGTH or len(request.tokens) != tokens:
            made = f"{len(request.tokens)} of {tokens} tokens"
            raise BenchError(f"request {request.rid} ended {request.end} with {made}")


def measured(requests: Sequence[Request], seconds: float) -> dict[str, float]:
    """METRICS of one run."""
    gaps = [gap for request in requests for gap in request.gaps]
    ttfts = [request.ttft for request in requests]
    tpots = [request.tpot for request in requests]
    return {
        "tokens_per_second": sum(len(request.tokens) for request in requests) / seconds,
        "ttft_p50_s": percentile(ttfts, 0.5),
        "ttft_p95_s": percentile(ttfts, 0.95),
        "tpot_p50_s": percentile(tpots, 0.5),
        "tpot_p95_s": percentile(tpots, 0.95),
        "inter_token_jitter_s": percentile(gaps, 0.95) - percentile(gaps, 0.5),
        "max_itl_s": max(gaps),
    }


def measure(run: EngineRun, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs that count; a repetition goes through every concurrency before the next begins."""
    runs = []
    for turn in range(args.warmup + args.repeats):
        for concurrency in args.concurrency:
            found = one_run(run, concurrency, args)
            if turn >= args.warmup:
                case = {"concurrency": concurrency, "repeat": turn - args.warmup}
                runs.append(case | found)
        print(f"[{turn + 1}/{args.warmup + args.repeats}]", file=sys.stderr, flush=True)
    return runs


def rows_of(runs: Sequence[dict[str, Any]], warmup: int) -> list[dict[str, Any]]:
    """One row a concurrency and metric: its values over the repetitions."""
    return [
        make_row(
            {"concurrency": concurrency},
            metric,
            unit,
            [run[metric] for run in runs if run["concurrency"] == concurrency],
            warmup,
        )
        for concurrency in dict.fromkeys(run["concurrency"] for run in runs)
        for metric, unit in (METRICS | dict.fromkeys(COUNTERS, "steps")).items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a concurrency, the seed's tokens/s beside."""
    lines = []
    for concurrency in dict.fromkeys(row["case"]["concurrency"] for row in rows):
        cell = {r["metric"]: r for r in rows if r["case"]["concurrency"] == concurrency}
        rate, ttft, tpot = (cell[m] for m in ("tokens_per_second", "ttft_p50_s", "tpot_p50_s"))
        jitter, longest = cell["inter_token_jitter_s"], cell["max_itl_s"]
        steps = cell["prefill_decode_stream_overlap_steps"]["median"]
        line = (
            f"c{concurrency}: {rate['median']:.1f} tokens/s ({rate['min']:.1f}..{rate['max']:.1f})"
        )
        line += f"  TTFT {1e3 * ttft['median']:.2f} ms  TPOT {1e3 * tpot['median']:.2f} ms"
        line += f"  jitter {1e3 * jitter['median']:.2f}  max ITL {1e3 * longest['median']:.2f} ms"
        lines.append(line + f"  stream overlap {steps:.0f} steps")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = build_parser().parse_args(argv)
    engine = build(args)
    run = EngineRun(engine)
    runs = measure(run, args)
    rows = rows_of(runs, args.warmup)
    overlap = engine.config.enable_prefill_decode_overlap
    switches = switches_of(args, engine) | {"seed, tokens/s on an RTX 3050": SEED}
    seed = {"prefill_decode_overlap": overlap, "runs": runs}
    record = make_record("paged_concurrency", switches, rows, args.note, seed)
    write_record(record, args.output)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
