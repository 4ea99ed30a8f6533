#!/usr/bin/env python3
"""Tokens a second through Ray Serve and HTTP against the bare engine, at numbers of streams.

    scripts/write_random.py 3b /tmp/random-3b     # then start a server with model: {path: ...}
    scripts/bench_serve_rate.py --checkpoint /tmp/random-3b --streams 1,16,64 --output out.json

The engine in this process has the server's checkpoint and takes its settings from the server's
status; both must fit on the device at once, so give the server a KV budget in MiB. In a repetition
each path gets the same load in turn, the others idle: so many requests of one length, at once or
--gap-ms apart. `twin` is the bare engine given them at the instants at which the server's engine
got its own (by the machine's monotonic clock): over HTTP a burst spreads, and what the engine makes
of that is not HTTP's. `decode`: tokens between the last first token and the first end, when every
stream decodes (0 and not judged where there is no such time); a client that hears several tokens at
once counts them at that moment. `text`: all tokens over all time, prompts included. Exit code 1
where a share or the time added to the first token breaks a promise.
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
from results import make_record, write_record
from serve_rate_rows import TWIN, Found, measured, rows_of, table, verdict
from sse_client import StreamRecord, request_bytes, stream_request

LEAD_S = 0.05
"""From the order to the clients' processes to the moment in which all of them send: every path
begins on a device that has been idle for so long."""


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
    parser.add_argument(
        "--also", nargs="*", default=[], metavar="STREAMS:OUT:REPEATS", help="further loads"
    )
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def loads_of(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The flags of every load: --streams by --out, then those of --also."""
    made = [args]
    for text in args.also:
        streams, out, repeats = map(int, text.split(":"))
        other = {"streams": [streams], "out": out, "repeats": repeats}
        made.append(argparse.Namespace(**vars(args) | other))
    return made


def read_streams(url: str, timed: Sequence[tuple[float, dict[str, Any]]]) -> list[StreamRecord]:
    """One client process: each body is sent at its time of the machine's monotonic clock, and read
    to its end."""

    async def one(start: float, request: bytes) -> StreamRecord:
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        return await stream_request(url, request, time.perf_counter)

    async def all_of_them() -> list[StreamRecord]:
        requests = [(start, request_bytes(url, body)) for start, body in timed]
        return await asyncio.gather(*(one(*each) for each in requests))

    return asyncio.run(all_of_them())


class Clients:
    """Several processes, so that reading does not bound what is measured. Made before there is an
    engine: they are forked, and a device does not live on in a child.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._url = f"{args.url.rstrip('/')}/v1/completions"
        self.args = args
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
        gap, start = self.args.gap_ms / 1e3, time.perf_counter() + LEAD_S
        timed = [(start + gap * i, body) for i, body in enumerate(bodies)]
        shares = [timed[i :: self.args.clients] for i in range(min(streams, self.args.clients))]
        reading = [self._pool.submit(read_streams, self._url, share) for share in shares]
        return lambda: [record for future in reading for record in future.result()]

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()

    def body(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(self.prompts.next(self.args.prompt)),
            "max_tokens": self.args.out,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def through_engine(
    run: EngineRun, args: argparse.Namespace, sent: Sequence[float], came: Sequence[float] = ()
) -> list[StreamRecord]:
    """Requests of one length, stepped to their end in this process. sent: seconds from the start
    at which the clients send; came: when the engine gets them, left out where that is the same.
    What comes while a step is being launched has waited for it, as behind HTTP."""
    requests, due = list[Request](), came or sent
    prompts = [run.prompt(args.prompt) for _ in due]  # clients have theirs when they send
    # A device that has just worked gives a first token half a millisecond sooner.
    time.sleep(LEAD_S)
    start = run.clock()
    while len(requests) < len(due) or run.engine.has_work:
        while len(requests) < len(due) and run.clock() >= start + due[len(requests)]:
            at = start + sent[len(requests)]
            requests.append(run.submit(prompts[len(requests)], args.out))
            requests[-1].sent = at
        if run.engine.has_work:
            run.step()
    run.requests.clear()
    return [StreamRecord(r.sent, list(r.times), len(r.tokens), r.prompt_tokens) for r in requests]


class Twin:
    """The bare engine, given requests when the server's engine got those of the last burst over
    HTTP. What HTTP adds to it is its ways in and out; the rest is the order of arrival."""

    def __init__(self, run: EngineRun, clients: Clients, args: argparse.Namespace) -> None:
        self._run, self._clients, self._args = run, clients, args
        self._sent: list[float] = []
        self._came: list[float] = []

    def http(self, streams: int) -> list[StreamRecord]:
        """Over HTTP, kept in mind. Raises BenchError where the server got other requests too."""
        records = self._clients(streams)
        start = min(record.sent for record in records)
        status: dict[str, Any] = fetch_json(f"{self._args.url.rstrip('/')}/v1/status")
        came = sorted(at - start for at in status["queue"]["arrivals"] if at >= start)
        if len(came) != streams:
            raise BenchError(f"the server's engine got {len(came)} requests, not {streams}")
        self._sent, self._came = sorted(record.sent - start for record in records), came
        return records

    def __call__(self, streams: int) -> list[StreamRecord]:
        """The same in this process."""
        return through_engine(self._run, self._args, self._sent, self._came)


Send = Callable[[int], list[StreamRecord]]


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


def paths_of(run: EngineRun, clients: Clients, args: argparse.Namespace) -> dict[str, Send]:
    """What each path does with a number of streams."""
    twin, gap = Twin(run, clients, args), args.gap_ms / 1e3
    return {
        "engine": lambda streams: through_engine(run, args, [gap * i for i in range(streams)]),
        "http": twin.http,
        TWIN: twin,
    }


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
        rows: list[dict[str, Any]] = []
        for load in loads_of(args):
            clients.args = load
            found = measure(paths_of(run, clients, load), load)
            made = rows_of(found, load.warmup, load.out)
            print(table(made), flush=True)
            rows += made
    finally:
        clients.close()
    switches = switches_of(args, engine) | {"server": status}
    write_record(make_record("serve_rate", switches, rows, args.note), args.output)
    broken = verdict(rows)
    print("\n".join(broken), end="\n" * bool(broken))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
