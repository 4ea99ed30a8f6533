#!/usr/bin/env python3
"""What Ray Serve and HTTP add to the bare engine: first token and step, one stream at a time.

    scripts/bench_serve_overhead.py --url http://127.0.0.1:8000 --output out.json

Start the server first, with the model and settings given here. Each repetition sends the same
requests to an engine in this process and to the server, one path idle while the other works; the
overhead is the difference of the two medians inside a repetition. The model's tokens must be text:
one that ends inside a character is held back by the server and would be timed with the next.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_http import fetch_json, latencies
from cpu_peers import OurEngine, Prompts, build_our_engine
from results import make_record, make_row, write_record
from sse_client import StreamRecord, stream_completion

METRICS = ("ttft", "itl")
LEAST_HEARD = 0.9
"""Share of the tokens that must arrive one by one, so that a gap is a step."""
LIMITS_S = {"ttft": 0.005, "itl": 0.001}
"""What the project allows itself to add at the median."""


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a server of ours")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--cache-dir", type=Path, help="where the demo model is kept")
    parser.add_argument("--model", type=Path, help="the server's checkpoint, where not the demo")
    parser.add_argument("--threads", type=int, help="of the engine in this process")
    parser.add_argument("--requests", type=int, default=8, help="of one repetition and path")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def overhead_rows(
    runs: Sequence[dict[str, list[StreamRecord]]], warmup: int
) -> list[dict[str, Any]]:
    """Latencies of both paths, pooled, then the overhead of each repetition."""
    rows = []
    for metric in METRICS:
        medians: dict[str, list[float]] = {}
        for path in ("engine", "http"):
            values = [latencies(run[path])[metric] for run in runs]
            medians[path] = [statistics.median(repetition) for repetition in values]
            pooled = [value for repetition in values for value in repetition]
            rows.append(make_row({"path": path}, metric, "s", pooled, warmup))
        pairs = zip(medians["engine"], medians["http"], strict=True)
        added = [http - engine for engine, http in pairs]
        rows.append(make_row({"path": "http - engine"}, f"{metric}_overhead", "s", added, warmup))
    return rows


def through_engine(engine: OurEngine, args: argparse.Namespace) -> list[StreamRecord]:
    """The requests of one repetition, each stepped to its end in this process."""
    return [
        engine.stream(args.prompt_tokens, args.max_tokens, time.perf_counter)
        for _ in range(args.requests)
    ]


async def through_http(
    args: argparse.Namespace, model: str, prompts: Prompts
) -> list[StreamRecord]:
    """The same over HTTP, one after the other."""
    records = []
    for _ in range(args.requests):
        body = {
            "model": model,
            "prompt": list(prompts.next(args.prompt_tokens)),
            "max_tokens": args.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"{args.url.rstrip('/')}/v1/completions"
        records.append(await stream_completion(url, body, time.perf_counter))
    return records


def heard_one_by_one(
    runs: Sequence[dict[str, list[StreamRecord]]], args: argparse.Namespace
) -> bool:
    """False, with a line on stderr, where the server sent several tokens at once too often."""
    gaps = sum(len(latencies(run["http"])["itl"]) for run in runs)
    expected = len(runs) * args.requests * (args.max_tokens - 1)
    if gaps >= LEAST_HEARD * expected:
        return True
    print(f"only {gaps} of {expected} tokens came alone: the figures are no steps", file=sys.stderr)
    return False


def measure(
    args: argparse.Namespace,
    paths: dict[str, Callable[[], list[StreamRecord]]],
) -> list[dict[str, list[StreamRecord]]]:
    """All repetitions, the paths interleaved. Raises RuntimeError if a request failed."""
    runs = []
    for turn in range(args.warmup + args.repeats):
        run = {name: send() for name, send in paths.items()}
        for name, records in run.items():
            if errors := [record.error for record in records if record.error]:
                raise RuntimeError(f"{name}: {errors[0]}")
        if turn >= args.warmup:
            runs.append(run)
        print(f"[{turn + 1}/{args.warmup + args.repeats}]", file=sys.stderr)
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; exit code 1 where the overhead is above what we allow ourselves."""
    args = build_parser().parse_args(argv)
    from configs.load import cache_dir

    listing = fetch_json(f"{args.url.rstrip('/')}/v1/models")
    if not listing:
        print(f"no server of ours at {args.url}", file=sys.stderr)
        return 1
    model = listing["data"][0]["id"]
    engine, switches = build_our_engine(
        args.cache_dir or cache_dir(), {"cpu_threads": args.threads}, model=args.model
    )
    prompts = Prompts(engine.facts.vocab_size, seed=1)
    bare = OurEngine(engine, Prompts(engine.facts.vocab_size))
    runs = measure(
        args,
        {
            "engine": lambda: through_engine(bare, args),
            "http": lambda: asyncio.run(through_http(args, model, prompts)),
        },
    )
    rows = overhead_rows(runs, args.warmup)
    flags = {k: v for k, v in vars(args).items() if not isinstance(v, Path) and k != "note"}
    server = {"server": fetch_json(f"{args.url.rstrip('/')}/v1/status")}
    write_record(
        make_record("serve_overhead", flags | switches | server, rows, args.note), args.output
    )
    broken = not heard_one_by_one(runs, args)
    for row in rows:
        line = f"{row['metric']:<14} {row['case']['path']:<14} median {row['median'] * 1e3:8.3f} ms"
        limit = LIMITS_S.get(row["metric"].removesuffix("_overhead"))
        if row["case"]["path"] == "http - engine" and limit is not None:
            broken |= row["median"] > limit
            line += f"  (at most {limit * 1e3:g} ms)"
        print(line)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
