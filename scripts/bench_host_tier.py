#!/usr/bin/env python3
"""A long prefix visited again after it was evicted: from the host's memory against computed anew.

    scripts/bench_host_tier.py --output docs/results/host_tier_3b_h200.json

One engine, with the tier and without it in turns, and a KV pool that holds hardly three such
prefixes. A visit is the prefix and a few ids of its own. Three kinds: `first` (nobody has sent
it, and it evicts others), `cached` (again at once) and `evicted` (again after others have taken its
blocks). On an idle engine and beside streams, whose longest gap during the visit counts as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_actor.core.host_tier import HostTier
from engine_actor.core.prefix import CacheChanges
from engine_runs import BenchError, EngineRun, add_model_flags, engine_of, switches_of
from results import make_record, make_row, percentile, write_record

Found = dict[tuple[str, int, str, str], list[float]]
"""(visit, streams, tier, metric) -> raw values."""
UNITS = {"ttft": "ms", "longest_gap": "ms", "cached_tokens": "tokens"}


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser, default="random:3b")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--prefix", type=int, default=4000, help="tokens that visits share")
    parser.add_argument("--tail", type=int, default=16, help="tokens of a visit's own")
    parser.add_argument("--others", type=int, default=3, help="prefixes that evict it")
    parser.add_argument("--streams", type=int, nargs="*", default=[0, 8])
    parser.add_argument("--stream-prompt", type=int, default=64)
    parser.add_argument("--stream-tokens", type=int, default=1500, help="at most, of each")
    parser.add_argument("--budget-mb", type=int, default=416, help="of the KV pool")
    parser.add_argument("--host-budget-mb", type=int, default=2048)
    parser.add_argument("--max-cache", type=int, default=8192, help="context limit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def measure(args: argparse.Namespace, found: Found) -> dict[str, Any]:
    """Both crowds, each with the tier and without it in turns. Returns the switches."""
    settings: dict[str, Any] = {
        "max_num_seqs": max(args.streams) + 1,
        "kv": {"budget_mb": args.budget_mb, "host_budget_mb": args.host_budget_mb},
    }
    engine = engine_of(args, settings, max_model_len=args.max_cache)
    run, on = EngineRun(engine), engine.kv.tier
    tiers = {"off": HostTier(0, engine.kv.copies, CacheChanges()), "on": on}
    for streams in args.streams:
        for turn in range(args.warmup + args.repeats):
            for name, tier in tiers.items():
                engine.kv.reset_prefix_cache()
                engine.kv.tier = tier
                for _ in range(streams):
                    run.submit(args.stream_prompt, args.stream_tokens)
                run.until(lambda: all(request.times for request in run.requests.values()))
                for kind, values in visits(run, args).items():
                    for metric, value in values.items():
                        if turn >= args.warmup:
                            found.setdefault((kind, streams, name, metric), []).append(value)
                run.cancel_all()
    return switches_of(args, engine)


def visits(run: EngineRun, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One of each kind, in the order in which they follow from each other."""
    prefix = run.prompt(args.prefix)
    result = {"first": visit(run, args, prefix), "cached": visit(run, args, prefix)}
    for _ in range(args.others):
        visit(run, args, run.prompt(args.prefix))
    return result | {"evicted": visit(run, args, prefix)}


def visit(run: EngineRun, args: argparse.Namespace, prefix: Sequence[int]) -> dict[str, float]:
    """The prefix and a tail up to the first token; what it and the streams beside it saw."""
    streams = list(run.requests.values())
    before = run.counters("cached_prompt_tokens_total")["cached_prompt_tokens_total"]
    request = run.submit((*prefix, *run.prompt(args.tail)), 1)
    run.until(lambda: request.end is not None)
    for stream in streams:
        if stream.end is not None:
            raise BenchError("--stream-tokens: a stream ended before the last visit")
    gaps = [
        b - a
        for stream in streams
        for a, b in zip(stream.times, stream.times[1:], strict=False)
        if b >= request.sent
    ]
    after = run.counters("cached_prompt_tokens_total")["cached_prompt_tokens_total"]
    del run.requests[request.rid]
    found = {"ttft": 1e3 * request.ttft, "cached_tokens": float(after - before)}
    return found | ({"longest_gap": 1e3 * max(gaps)} if gaps else {})


def table(found: Found) -> str:
    """Medians: a line a visit and crowd."""
    lines = [f"{'visit':8} {'streams':>7}  {'tier':4} {'ttft ms':>8} {'gap ms':>7} {'cached':>7}"]
    for name, streams, tier, metric in found:
        if metric != "ttft":
            continue
        values = [
            percentile(found[name, streams, tier, other], 0.5)
            if (name, streams, tier, other) in found
            else float("nan")
            for other in ("ttft", "longest_gap", "cached_tokens")
        ]
        row = f"{name:8} {streams:7d}  {tier:4} {values[0]:8.2f} {values[1]:7.2f} {values[2]:7.0f}"
        lines.append(row)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = build_parser().parse_args(argv)
    found: Found = {}
    switches = measure(args, found)
    rows = [
        make_row(
            {"visit": name, "streams": streams, "tier": tier},
            metric,
            UNITS[metric],
            raw,
            args.warmup,
        )
        for (name, streams, tier, metric), raw in found.items()
    ]
    print(table(found), flush=True)
    write_record(make_record("host_tier", switches, rows, args.note), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
