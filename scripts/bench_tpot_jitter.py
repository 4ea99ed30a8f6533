#!/usr/bin/env python3
"""A long prompt comes in while streams decode, with the seed's flags and fields (section 10.4).

    scripts/bench_tpot_jitter.py --checkpoint random:3b --backend w4a16 --max-cache 256 \\
        --max-new-tokens 12 --chunk-sizes 128 --long-repeat 8 \\
        --output docs/results/tpot_jitter_3b_chunk128_overlap.json

A run is one insertion: the streams decode undisturbed, the long prompt is submitted, and until its
first token every time between two tokens of a stream is disturbed. Exit code 1 where a run breaks a
promise: --max-itl-ms, --p95-tpot-ms, --ttft-ms.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bench_paged_scheduler import COUNTERS, add_seed_flags, numbers, seed_settings
from engine_actor.engine import Engine
from engine_actor.messages import Limit
from engine_runs import BenchError, EngineRun, Request, add_model_flags, engine_of, switches_of
from memory_use import give_back
from results import make_record, make_row, percentile, write_record

MODES = ("serial", "two_streams", "two_streams_capped", "green", "mixed")
METRICS = {
    "ttft_s": "s",
    "ttft_alone_s": "s",
    "itl_p50_s": "s",
    "itl_p95_s": "s",
    "itl_p99_s": "s",
    "max_itl_s": "s",
    "inter_token_jitter_s": "s",
    "tpot_p50_s": "s",
    "tpot_p95_s": "s",
    "undisturbed_itl_p50_s": "s",
    "undisturbed_itl_p99_s": "s",
    "tokens_per_second": "tokens/s",
}
"""What a run measures, and its unit. ITL, TPOT and jitter (p95 minus p50 of ITL) are the streams'
while the prompt comes in; the tokens are theirs and the prompt's."""
ALL_COUNTERS = (*COUNTERS, "prefill_decode_mixed_forward_steps")
SEED = {"inter_token_jitter_s": (0.5819, 0.5707), "max_itl_s": (0.6605, 0.6489)}
SEED |= {"ttft_s": (1.0299, 1.0195)}
"""The seed's values without and with overlap: 189 tokens, chunk 128 (RTX 3050)."""
VLLM = "vLLM 0.26 W4, 8,000 tokens into 8 streams: ITL 3.4 ms undisturbed, p50 17 and max 22 to 30 "
VLLM += "ms while it comes in, TTFT 105 to 126 ms (another run, H200)"


def build_parser() -> argparse.ArgumentParser:
    """The seed's flags, and what makes a result of ours; all end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser)
    add_seed_flags(parser)
    parser.set_defaults(max_cache=256, max_new_tokens=12)
    parser.add_argument("--chunk-sizes", type=numbers, default=[128], help="as in 128,512")
    parser.add_argument("--long-repeat", type=int, default=8, help="the phrase, so many times")
    parser.add_argument("--phrase-tokens", type=int, default=24)
    parser.add_argument("--streams", type=int, default=1, help="that decode")
    parser.add_argument("--short-tokens", type=int, default=16, help="of the streams' prompts")
    parser.add_argument("--lead-tokens", type=int, default=8, help="of each stream, undisturbed")
    parser.add_argument(
        "--overlap-modes",
        nargs="+",
        choices=MODES,
        default=[None],
        help="ways to share the device, one engine each; default: the engine's",
    )
    parser.add_argument("--max-itl-ms", type=float, help="promise: the longest ITL of a run")
    parser.add_argument("--p95-tpot-ms", type=float, help="promise: p95 of the streams' TPOT")
    parser.add_argument("--ttft-ms", type=float, help="promise: the long prompt's first token")
    return parser


def build(args: argparse.Namespace, mode: str | None) -> Engine:
    """The engine of these flags. Raises BenchError where the long request does not fit."""
    needed = args.phrase_tokens * args.long_repeat + args.max_new_tokens
    if needed > args.max_cache:
        raise BenchError(f"--max-cache {args.max_cache}: the long request needs {needed} tokens")
    settings = seed_settings(args, args.streams + 1)
    settings["prefill_chunk_tokens"] = max(args.chunk_sizes)
    if mode is not None:
        settings["overlap_mode"] = mode
    return engine_of(args, settings, max_model_len=args.max_cache)


def long_prompt(run: EngineRun, args: argparse.Namespace) -> tuple[int, ...]:
    """A phrase of its own, repeated."""
    return run.prompt(args.phrase_tokens) * args.long_repeat


def alone(run: EngineRun, args: argparse.Namespace) -> float:
    """Seconds to the first token of the long prompt on an idle engine."""
    request = run.submit(long_prompt(run, args), 1)
    run.finish()
    return request.ttft


def insertion(run: EngineRun, args: argparse.Namespace) -> dict[str, Any]:
    """One run. The streams go on until the long request has ended and are cancelled then."""
    # Drawn before: in the time of thousands of ids the streams would wait for the bench.
    phrase = long_prompt(run, args)
    streams = [
        run.submit(args.short_tokens, args.max_cache - args.short_tokens)
        for _ in range(args.streams)
    ]
    run.until(lambda: all(len(stream.times) > args.lead_tokens for stream in streams))
    before = run.counters(*ALL_COUNTERS)
    made = sum(len(stream.times) for stream in streams)
    long = run.submit(phrase, args.max_new_tokens)
    run.until(lambda: bool(long.times))
    after = run.counters(*ALL_COUNTERS)
    made = sum(len(stream.times) for stream in streams) - made
    tokens = {"tokens_per_second": (made + long.prompt_tokens) / long.ttft}
    run.until(lambda: long.end is not None)
    if any(stream.end for stream in streams):
        raise BenchError(f"--max-cache {args.max_cache}: a stream ended before the long request")
    found = measured(streams, long) | tokens
    run.cancel_all()
    return found | {name: after[name] - before[name] for name in ALL_COUNTERS}


def measured(streams: Sequence[Request], long: Request) -> dict[str, float]:
    """METRICS of one insertion from the times of all tokens."""
    first = long.times[0]
    disturbed: list[float] = []
    undisturbed: list[float] = []
    tpots = []
    for stream in streams:
        ends = stream.times[1:]
        pairs = list(zip(ends, stream.gaps, strict=True))
        inside = [gap for end, gap in pairs if long.sent < end <= first]
        undisturbed += [gap for end, gap in pairs if end <= long.sent]
        disturbed += inside
        if inside:
            tpots.append(sum(inside) / len(inside))
    if not disturbed:
        raise BenchError("no stream made a token while the long prompt came in")
    median = percentile(disturbed, 0.5)
    return {
        "ttft_s": long.ttft,
        "itl_p50_s": median,
        "itl_p95_s": percentile(disturbed, 0.95),
        "itl_p99_s": percentile(disturbed, 0.99),
        "max_itl_s": max(disturbed),
        "inter_token_jitter_s": percentile(disturbed, 0.95) - median,
        "tpot_p50_s": percentile(tpots, 0.5),
        "tpot_p95_s": percentile(tpots, 0.95),
        "undisturbed_itl_p50_s": percentile(undisturbed, 0.5),
        "undisturbed_itl_p99_s": percentile(undisturbed, 0.99),
    }


def measure(engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All chunk sizes and repetitions of one engine."""
    run, runs = EngineRun(engine), []
    mode = engine.pair.mode.value
    for chunk in args.chunk_sizes:
        engine.limit(Limit(prefill_chunk_tokens=chunk))
        for turn in range(args.warmup + args.repeats):
            found = {"ttft_alone_s": alone(run, args)} | insertion(run, args)
            if turn >= args.warmup:
                case = {"mode": mode, "chunk_tokens": chunk, "repeat": turn - args.warmup}
                runs.append(case | found)
        print(f"{mode}, chunk {chunk}: done", file=sys.stderr, flush=True)
    return runs


def rows_of(runs: Sequence[dict[str, Any]], warmup: int) -> list[dict[str, Any]]:
    """One row a mode, chunk size and metric: its values over the repetitions."""
    return [
        make_row(
            {"mode": mode, "chunk_tokens": chunk},
            metric,
            unit,
            [run[metric] for run in runs if (run["mode"], run["chunk_tokens"]) == (mode, chunk)],
            warmup,
        )
        for mode, chunk in dict.fromkeys((run["mode"], run["chunk_tokens"]) for run in runs)
        for metric, unit in (METRICS | dict.fromkeys(ALL_COUNTERS, "steps")).items()
    ]


def broken_promises(runs: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """One line for each promise that any run of a mode and chunk size breaks."""
    promises = {
        "max_itl_s": args.max_itl_ms,
        "tpot_p95_s": args.p95_tpot_ms,
        "ttft_s": args.ttft_ms,
    }
    lines = []
    for mode, chunk in dict.fromkeys((run["mode"], run["chunk_tokens"]) for run in runs):
        for metric, most in promises.items():
            values = [r[metric] for r in runs if (r["mode"], r["chunk_tokens"]) == (mode, chunk)]
            if most is not None and 1e3 * max(values) > most:
                name = metric.removesuffix("_s")
                worst = f"{1e3 * max(values):.2f} ms, at most {most:g} was promised"
                lines.append(f"BROKEN {mode}, chunk {chunk}: {name} {worst}")
    return lines


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a mode and chunk size, ms."""
    cells: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        place = row["case"]["mode"], row["case"]["chunk_tokens"]
        cells.setdefault(place, {})[row["metric"]] = row
    lines = []
    for (mode, chunk), cell in cells.items():
        ms = {name: 1e3 * row["median"] for name, row in cell.items()}
        line = f"{mode} chunk {chunk}: ITL {ms['undisturbed_itl_p50_s']:.2f} -> p50"
        line += f" {ms['itl_p50_s']:.2f} p99 {ms['itl_p99_s']:.2f} max {ms['max_itl_s']:.2f} ms"
        line += f" (worst {1e3 * cell['max_itl_s']['max']:.2f})"
        line += f"  jitter {ms['inter_token_jitter_s']:.2f}  p95 TPOT {ms['tpot_p95_s']:.2f}"
        line += f"  TTFT {ms['ttft_s']:.1f} (alone {ms['ttft_alone_s']:.1f}) ms"
        lines.append(line)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a promise is broken."""
    args = build_parser().parse_args(argv)
    runs: list[dict[str, Any]] = []
    switches: dict[str, Any] = {}
    overlap = not args.no_prefill_decode_overlap
    for mode in args.overlap_modes:
        engine = build(args, mode)
        runs += measure(engine, args)
        switches |= switches_of(args, engine)
        overlap, device = engine.config.enable_prefill_decode_overlap, engine.facts.device
        del engine
        give_back(device)
    rows = rows_of(runs, args.warmup)
    switches |= {"seed, no overlap and overlap": SEED, "peer": VLLM}
    seed = {"prefill_decode_overlap": overlap, "runs": runs}
    write_record(make_record("tpot_jitter", switches, rows, args.note, seed), args.output)
    print(table(rows))
    broken = broken_promises(runs, args)
    print("\n".join(broken), end="\n" * bool(broken))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
