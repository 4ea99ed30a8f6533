#!/usr/bin/env python3
"""Load an OpenAI-compatible server at rising concurrency and write what its clients saw.

    scripts/bench_http.py --url http://127.0.0.1:8000 --concurrency 1,4,16 --output out.json

Works on ours and on any peer. TTFT: request sent to first text. TPOT: mean time per further token
of one request. ITL: gap between two events of one stream. Knows nothing of the server's inside; it
only copies the server's own switches from /v1/status, where that exists, into the result.
Exit code 1 if any request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from results import make_record, make_row, write_record
from sse_client import Clock, StreamRecord, stream_completion

WORDS = (
    "the river bends past an old mill where three children count boats and the miller sings while "
    "rain falls on red roofs far away and a train leaves for the coast"
).split()


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="base URL, without /v1")
    parser.add_argument("--model", help="model name; default: the first of /v1/models")
    parser.add_argument("--api-key", help="sent as a bearer token, never written to the result")
    parser.add_argument("--label", default="", help="name of the server in tables and plots")
    parser.add_argument("--concurrency", default="1,2,4,8", help="streams at once, a sweep")
    parser.add_argument("--requests-per-stream", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each level")
    parser.add_argument("--warmup", type=int, default=1, help="runs thrown away before a level")
    parser.add_argument("--prompt-words", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--same-prompt", action="store_true", help="lets a prefix cache help")
    parser.add_argument("--stop-at-eos", action="store_true", help="do not send ignore_eos")
    parser.add_argument("--body", default="{}", help="more request fields, as JSON")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--plot", type=Path, help="PNG; needs matplotlib (extra bench)")
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def prompt_text(number: int, words: int) -> str:
    """A prompt of `words` words; two numbers share no prefix, so no prefix cache can help."""
    start = number * 7
    body = [WORDS[(start + i * (1 + number % 5)) % len(WORDS)] for i in range(max(words - 1, 0))]
    return " ".join([f"Story {number}:", *body])


def request_body(args: argparse.Namespace, model: str, number: int) -> dict[str, Any]:
    """The completion request with this number."""
    body = {
        "model": model,
        "prompt": prompt_text(0 if args.same_prompt else number, args.prompt_words),
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not args.stop_at_eos:
        body["ignore_eos"] = True
    return body | json.loads(args.body)


async def run_level(
    send: Callable[[int], Any], streams: int, per_stream: int, first: int, clock: Clock
) -> tuple[list[StreamRecord], float]:
    """`streams` clients, each `per_stream` requests in a row: the records and the seconds."""
    records: list[StreamRecord] = []

    async def client(index: int) -> None:
        for turn in range(per_stream):
            records.append(await send(first + index * per_stream + turn))

    started = clock()
    await asyncio.gather(*(client(index) for index in range(streams)))
    return records, clock() - started


def latencies(records: Sequence[StreamRecord]) -> dict[str, list[float]]:
    """ttft and tpot (one per request), itl (one per gap), e2e, in seconds; failed ones left out."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2e": []}
    for record in records:
        times = record.event_times
        if record.error or not times:
            continue
        found["ttft"].append(times[0] - record.sent)
        found["e2e"].append(times[-1] - record.sent)
        found["itl"] += [later - earlier for earlier, later in itertools.pairwise(times)]
        if record.tokens > 1:
            found["tpot"].append((times[-1] - times[0]) / (record.tokens - 1))
    return found


def rows_of_level(
    case: dict[str, Any], runs: Sequence[tuple[list[StreamRecord], float]], warmup: int
) -> list[dict[str, Any]]:
    """The rows of one concurrency: rates once a run, latencies pooled over all runs."""
    tokens = [sum(r.tokens for r in records) / seconds for records, seconds in runs]
    requests = [len([r for r in records if not r.error]) / seconds for records, seconds in runs]
    rows = [
        make_row(case, "output_tokens_per_second", "tokens/s", tokens, warmup),
        make_row(case, "requests_per_second", "1/s", requests, warmup),
    ]
    pooled = latencies([record for records, _ in runs for record in records])
    rows += [make_row(case, name, "s", raw, warmup) for name, raw in pooled.items() if raw]
    return rows


async def sweep(args: argparse.Namespace, model: str, clock: Clock) -> tuple[list[Any], list[str]]:
    """All levels of the sweep: rows and the errors seen."""
    url = f"{args.url.rstrip('/')}/v1/completions"

    async def send(number: int) -> StreamRecord:
        return await stream_completion(url, request_body(args, model, number), clock, args.api_key)

    rows: list[Any] = []
    errors: list[str] = []
    levels = [int(level) for level in args.concurrency.split(",")]
    bar = Bar(len(levels) * (args.warmup + args.repeats))
    number = 0
    for level in levels:
        runs = []
        for turn in range(args.warmup + args.repeats):
            records, seconds = await run_level(send, level, args.requests_per_stream, number, clock)
            number += len(records)
            errors += [record.error for record in records if record.error]
            rate = sum(record.tokens for record in records) / seconds if seconds else 0.0
            bar.step(f"{level} streams, {rate:.0f} tokens/s")
            if turn >= args.warmup:
                runs.append((records, seconds))
        rows += rows_of_level({"concurrency": level}, runs, args.warmup)
    return rows, errors


class Bar:
    """A progress bar on stderr; one plain line a step where stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0

    def step(self, text: str) -> None:
        """One run is over."""
        self._done += 1
        width = 30 * self._done // self._total
        line = f"[{'#' * width:<30}] {self._done}/{self._total} {text}"
        live = sys.stderr.isatty() and self._done < self._total
        print(
            f"\r{line:<78}" if sys.stderr.isatty() else line,
            end="" if live else "\n",
            file=sys.stderr,
        )


def fetch_json(url: str) -> Any:
    """The JSON at url, None where there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


def switches_of(args: argparse.Namespace, status: Any) -> dict[str, Any]:
    """Every flag but the secret, and the server's own settings."""
    hidden = {"api_key", "output", "plot", "note"}
    flags = {name: value for name, value in vars(args).items() if name not in hidden}
    return flags | {"server": status}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line a level and metric."""
    for row in rows:
        scale, unit = (1000, "ms") if row["unit"] == "s" else (1, row["unit"])
        values = "  ".join(f"{k} {row[k] * scale:9.2f}" for k in ("median", "p95", "p99", "max"))
        print(f"c={row['case']['concurrency']:<4} {row['metric']:<26} {values}  {unit}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; returns the exit code."""
    args = build_parser().parse_args(argv)
    base = args.url.rstrip("/")
    model = args.model
    if model is None:
        listing = fetch_json(f"{base}/v1/models")
        if not listing:
            print(f"no model list at {base}/v1/models; give --model", file=sys.stderr)
            return 1
        model = listing["data"][0]["id"]
    status = fetch_json(f"{base}/v1/status")
    rows, errors = asyncio.run(sweep(args, model, time.perf_counter))
    record = make_record("http", switches_of(args, status) | {"model": model}, rows, args.note)
    write_record(record, args.output)
    print_table(rows)
    for error in sorted(set(errors)):
        print(f"failed ({errors.count(error)}x): {error}", file=sys.stderr)
    if args.plot:
        from plot_http import plot

        plot([record], args.plot)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
