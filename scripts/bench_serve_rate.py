#!/usr/bin/env python3
"""Tokens a second through Ray Serve and HTTP against the bare engine, at numbers of streams.

    scripts/write_random.py 3b /tmp/random-3b     # then start a server with model: {path: ...}
    scripts/bench_serve_rate.py --checkpoint /tmp/random-3b --streams 1,16,64 --output out.json

The engine in this process has the server's checkpoint and takes its settings from the server's
status; both must fit on the device at once, so give the server a KV budget in MiB. In a repetition
each path gets the same load in turn, the other idle: so many requests of one length, at once or
--gap-ms apart. `decode`: tokens between the last first token and the first end, when every stream
decodes (0 and not judged where there is no such time); a client that hears several tokens at once
counts them at that moment. `text`: all tokens over all time, prompts included. Exit code 1 where a
share or the time added to the first token breaks a promise.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench_http import fetch_json
from bench_paged_scheduler import numbers
from cpu_peers import Prompts
from engine_actor.engine import Engine
from engine_runs import BenchError, EngineRun, Request, add_model_flags, engine_of, switches_of
from results import make_record, make_row, percentile, write_record
from sse_client import StreamRecord, stream_completion

LEAD_S = 0.05
"""From the order to the clients' processes to the moment in which all of them send."""
LEAST_SHARE = 0.8
MOST_TTFT_S = 0.005
"""What the project allows Serve and HTTP to cost: of the engine's rate, and at the median."""
RATES = ("decode_tokens_per_second", "text_tokens_per_second")


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a server of ours")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds for it to be ready")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--streams", type=numbers, default=[1, 16, 64], help="as in 1,16,64")
    parser.add_argument("--prompt", type=int, default=512, help="tokens in")
    parser.add_argument("--out", type=int, default=128, help="tokens out of each stream")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="from one's start to the next's")
    parser.add_argument("--clients", type=int, default=8, help="processes that read, at most")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="repetitions thrown away")
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def read_streams(url: str, timed: Sequence[tuple[float, dict[str, Any]]]) -> list[StreamRecord]:
    """One client process: each body is sent at its time of the machine's monotonic clock, and read
    to its end."""

    async def one(start: float, body: dict[str, Any]) -> StreamRecord:
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        return await stream_completion(url, body, time.perf_counter)

    async def all_of_them() -> list[StreamRecord]:
        return await asyncio.gather(*(one(*each) for each in timed))

    return asyncio.run(all_of_them())


class Clients:
    """Several processes, so that reading does not bound what is measured. Made before there is an
    engine: they are forked, and a device does not live on in a child.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._url = f"{args.url.rstrip('/')}/v1/completions"
        self._args = args
        self._pool = ProcessPoolExecutor(args.clients, multiprocessing.get_context("fork"))
        list(self._pool.map(abs, range(args.clients)))  # all are there
        self.model = ""
        self.prompts = Prompts(1)

    def __call__(self, streams: int) -> list[StreamRecord]:
        """So many streams at once. Raises RuntimeError where one of them failed."""
        records = self.begin(streams)()
        if errors := [record.error for record in records if record.error]:
            raise RuntimeError(f"http: {errors[0]}")
        return records

    def begin(self, streams: int, out: int | None = None) -> Callable[[], list[StreamRecord]]:
        """Send so many, of `out` tokens where they are not to be --out; what waits for all ends."""
        bodies = [self.body() | ({"max_tokens": out} if out else {}) for _ in range(streams)]
        gap, start = self._args.gap_ms / 1e3, time.perf_counter() + LEAD_S
        timed = [(start + gap * i, body) for i, body in enumerate(bodies)]
        shares = [timed[i :: self._args.clients] for i in range(min(streams, self._args.clients))]
        reading = [self._pool.submit(read_streams, self._url, share) for share in shares]
        return lambda: [record for future in reading for record in future.result()]

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()

    def body(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(self.prompts.next(self._args.prompt)),
            "max_tokens": self._args.out,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def through_engine(run: EngineRun, streams: int, args: argparse.Namespace) -> list[StreamRecord]:
    """The same load, stepped to its end in this process. What comes while a step is being launched
    has waited for it, as behind HTTP."""
    start, requests = run.clock(), list[Request]()
    while len(requests) < streams or run.engine.has_work:
        while len(requests) < streams and run.clock() >= (
            due := start + args.gap_ms / 1e3 * len(requests)
        ):
            requests.append(run.submit(args.prompt, args.out))
            requests[-1].sent = due if args.gap_ms else requests[-1].sent
        if run.engine.has_work:
            run.step()
    run.requests.clear()
    return [StreamRecord(r.sent, list(r.times), len(r.tokens), r.prompt_tokens) for r in requests]


def measured(records: Sequence[StreamRecord]) -> dict[str, float]:
    """The two rates in tokens/s, the median time to the first token in s, tokens of one event."""
    first = max(record.event_times[0] for record in records)
    last = min(record.event_times[-1] for record in records)
    inside = 0.0
    for record in records:
        events = sum(first < at <= last for at in record.event_times)
        inside += record.tokens * events / len(record.event_times)
    sent = min(record.sent for record in records)
    ended = max(record.event_times[-1] for record in records)
    tokens = sum(record.tokens for record in records)
    return {
        "decode_tokens_per_second": inside / (last - first) if last > first else 0.0,
        "text_tokens_per_second": tokens / (ended - sent),
        "ttft": percentile([record.event_times[0] - record.sent for record in records], 0.5),
        "tokens_per_event": tokens / sum(len(record.event_times) for record in records),
    }


Send = Callable[[int], list[StreamRecord]]
Found = dict[tuple[int, str], list[dict[str, float]]]
"""(streams, path) -> what each repetition gave."""


def measure(paths: dict[str, Send], args: argparse.Namespace) -> Found:
    """All repetitions; the paths take turns inside each."""
    found: Found = {}
    for turn in range(args.warmup + args.repeats):
        for streams in args.streams:
            for name, send in paths.items():
                values = measured(send(streams))
                if turn >= args.warmup:
                    found.setdefault((streams, name), []).append(values)
        print(f"[{turn + 1}/{args.warmup + args.repeats}]", file=sys.stderr, flush=True)
    return found


UNITS = {
    "decode_tokens_per_second": "tokens/s",
    "text_tokens_per_second": "tokens/s",
    "ttft": "s",
    "tokens_per_event": "tokens",
}


def rows_of(found: Found, warmup: int) -> list[dict[str, Any]]:
    """Both paths, then what lies between them inside each repetition."""
    rows = [
        make_row({"streams": streams, "path": path}, name, unit, [v[name] for v in values], warmup)
        for (streams, path), values in found.items()
        for name, unit in UNITS.items()
    ]
    for streams in dict.fromkeys(streams for streams, _ in found):
        pairs = list(zip(found[streams, "engine"], found[streams, "http"], strict=True))
        case = {"streams": streams, "path": "http / engine"}
        for name in RATES:
            shares = [engine[name] and http[name] / engine[name] for engine, http in pairs]
            kind = name.partition("_")[0]
            rows.append(make_row(case, f"{kind}_share", "share", shares, warmup))
        added = [http["ttft"] - engine["ttft"] for engine, http in pairs]
        case = {"streams": streams, "path": "http - engine"}
        rows.append(make_row(case, "ttft_added", "s", added, warmup))
    return rows


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line a number of streams and promise that is broken."""
    lines = []
    for row in rows:
        where = f"{row['case']['streams']} streams"
        if row["metric"] == "decode_share" and row["min"] and row["median"] < LEAST_SHARE:
            lines.append(f"BROKEN {where}: {row['median']:.0%} of the engine's tokens/s")
        if row["metric"] == "ttft_added" and row["median"] > MOST_TTFT_S:
            lines.append(f"BROKEN {where}: the first token {1e3 * row['median']:.2f} ms later")
    return lines


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a number of streams."""
    cells: dict[int, dict[tuple[str, str], float]] = {}
    for row in rows:
        streams, path = row["case"]["streams"], row["case"]["path"]
        cells.setdefault(streams, {})[path, row["metric"]] = row["median"]
    lines = []
    for streams, cell in cells.items():
        line = f"{streams:3d} streams:"
        for name in RATES:
            kind = name.partition("_")[0]
            engine, http = cell["engine", name], cell["http", name]
            line += f" {kind} {http:8.0f} of {engine:8.0f} tokens/s"
            line += f" ({cell['http / engine', f'{kind}_share']:.0%}) "
        ttft = [1e3 * cell[path, "ttft"] for path in ("engine", "http")]
        line += f" TTFT {ttft[0]:.2f} -> {ttft[1]:.2f} ms"
        line += f" (+{1e3 * cell['http - engine', 'ttft_added']:.2f})"
        lines.append(line + f"  {cell['http', 'tokens_per_event']:.2f} tokens an event")
    return "\n".join(lines)


def wait_for_server(args: argparse.Namespace) -> dict[str, Any]:
    """Its status once it is ready. Raises BenchError where that takes longer than --wait."""
    base, end = args.url.rstrip("/"), time.monotonic() + args.wait
    while not fetch_json(f"{base}/health/ready"):
        if time.monotonic() > end:
            raise BenchError(f"no server of ours is ready at {args.url}")
        time.sleep(0.1)
    status: dict[str, Any] = fetch_json(f"{base}/v1/status")
    return status


NOT_OURS = ("device", "num_engines")
"""Settings that the two engines need not share: here is one, on the device of --device."""


def engine_like(args: argparse.Namespace, status: dict[str, Any]) -> Engine:
    """An engine of the checkpoint with the settings of the server's; --set goes before them."""
    settings = {name: value for name, value in status["config"].items() if name not in NOT_OURS}
    return engine_of(args, settings, max_model_len=status["model"]["max_model_len"])


def require_same_settings(engine: Engine, status: dict[str, Any]) -> None:
    """Raise BenchError where the two engines would not do the same work."""
    same = dict.fromkeys(NOT_OURS)
    ours = engine.config.model_dump(mode="json") | same
    theirs = status["config"] | same
    other = [
        f"{name} {theirs.get(name)}, not {ours[name]}"
        for name in ours
        if theirs.get(name) != ours[name]
    ]
    blocks = engine.facts.kv_blocks, status["kv"]["blocks_budget"]
    if blocks[0] != blocks[1]:
        other.append(f"{blocks[1]} KV blocks, not {blocks[0]}")
    if other:
        raise BenchError(f"the server has other settings: {'; '.join(other)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = build_parser().parse_args(argv)
    clients = Clients(args)
    try:
        status = wait_for_server(args)
        engine = engine_like(args, status)
        require_same_settings(engine, status)
        clients.model = status["model"]["name"]
        clients.prompts = Prompts(engine.facts.vocab_size, seed=1)
        run = EngineRun(engine)
        paths: dict[str, Send] = {
            "engine": lambda streams: through_engine(run, streams, args),
            "http": clients,
        }
        rows = rows_of(measure(paths, args), args.warmup)
    finally:
        clients.close()
    switches = switches_of(args, engine) | {"server": status}
    write_record(make_record("serve_rate", switches, rows, args.note), args.output)
    print(table(rows))
    broken = verdict(rows)
    print("\n".join(broken), end="\n" * bool(broken))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
