#!/usr/bin/env python3
"""Several engines, a GPU each, behind one address: their rates, and what one engine's death does.

    scripts/write_random.py 3b /tmp/random-3b    # then a server with engine: {num_engines: 2}
    scripts/bench_two_engines.py --streams 64 --output docs/results/two-engines.json

The server is one of ours on this machine, with nobody else asking it. One prompt is asked for in
turn until every engine has answered; all streams at once are spread and timed; then an engine's
process is killed by SIGKILL amid long streams: each of them must end once, whole or told why, the
others must serve what comes next, and the dead one must come back. Only processes of the session
that listens at --url are looked at or killed. Rates: as bench_serve_rate.py has them, 0 included.
Exit code 1 with a line for whatever was otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench_http import fetch_json
from bench_paged_scheduler import numbers
from bench_serve_rate import Clients, wait_for_server
from cpu_peers import Prompts
from engine_runs import BenchError
from results import make_record, make_row, percentile, write_record
from serve_app.launch.processes import listener, session_leader, session_members
from serve_rate_rows import measured
from sse_client import StreamRecord

POLL_S = 0.02
MOST_ASKED = 40
"""Questions in turn until each engine has answered one."""
SETTLE_S = 0.2
"""From the death to what is asked next: until then the ingress may still send to the dead one."""
UNITS = {
    "decode_tokens_per_second": "tokens/s",
    "text_tokens_per_second": "tokens/s",
    "ttft": "s",
}


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a server of ours, here")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds for all its engines")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--streams", type=numbers, default=[64], help="as in 64,128")
    parser.add_argument("--prompt", type=int, default=512, help="tokens in")
    parser.add_argument("--out", type=int, default=128, help="tokens out of each stream")
    parser.add_argument("--long", type=int, default=1200, help="tokens out beside a death")
    parser.add_argument("--kill-after", type=float, default=0.3, help="seconds, all are running")
    parser.add_argument("--clients", type=int, default=16, help="processes that read, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="repetitions thrown away")
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


class Engines:
    """The server's engines, seen from outside: by its metrics page and by their processes."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        holder = listener(urlsplit(self._url).port or 80)
        leader = holder and session_leader(holder.pid)
        if leader is None:
            raise BenchError(f"nobody of this machine whose session can be seen is at {url}")
        self._session = leader.pid

    def count(self, metric: str) -> dict[str, int]:
        """A number without labels of its own, by the name of each engine that answers."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        sample = re.compile(rf'^{metric}\{{engine="([^"]+)"\}} (\S+)$', re.MULTILINE)
        return {name: int(float(value)) for name, value in sample.findall(page)}

    def running(self) -> dict[str, int]:
        """Requests in each engine."""
        return self.count("requests_running")

    def pids(self) -> set[int]:
        """The engines' processes."""
        members = session_members(self._session)
        return {member.pid for member in members if "EngineActor" in member.command}

    def cards(self, count: int) -> dict[str, str]:
        """The GPU of each engine by its UUID, "" on a CPU: whoever is asked tells of his own."""
        found: dict[str, str] = {}
        for _ in range(MOST_ASKED):
            status = fetch_json(f"{self._url}/v1/status")
            if status is not None:
                found[status["engine"]] = status["model"]["card_uuid"]
            if len(found) == count:
                break
        return found

    def complete(self, body: dict[str, Any]) -> str:
        """The text of one completion. Raises OSError."""
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        return text


def until(ask: Callable[[], Any], seconds: float) -> float | None:
    """Seconds until the answer was true, None where it never was. Polls: HTTP offers no event."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        with suppress(OSError):
            if ask():
                return time.monotonic() - start
        time.sleep(POLL_S)
    return None


class Bench:
    """All that is asked of one server. `wrong`: what must not be, a line each."""

    def __init__(self, engines: Engines, clients: Clients, args: argparse.Namespace) -> None:
        self.engines, self.clients, self.args = engines, clients, args
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.killed = 0.0

    def run(self, count: int) -> None:
        """Everything, for so many engines."""
        self.cards("before", count)
        self.same_texts("before", count)
        for streams in self.args.streams:
            self.rates(count, streams, "before")
        before = self.engines.pids()
        self.kill(count, self.args.streams[0])
        self.rates(count - 1, self.args.streams[0], "one is away")
        alone = self.engines.running()
        self.back(count, before)
        self.facts["away_for_all_of_it"] = len(alone) == count - 1
        self.cards("after", count)
        self.same_texts("after", count)
        self.rates(count, self.args.streams[0], "after")

    def cards(self, when: str, count: int) -> None:
        """Each engine has a process and a GPU of its own, or they are all on the CPU."""
        cards, pids = self.engines.cards(count), self.engines.pids()
        self.facts[f"cards {when}"] = cards
        self.expect(len(pids) == count, f"{when}: {len(pids)} processes of engines, not {count}")
        self.expect(len(cards) == count, f"{when}: only {sorted(cards)} tell of themselves")
        own = {uuid for uuid in cards.values() if uuid}
        self.expect(len(own) in (0, count), f"{when}: engines share a GPU: {cards}")

    def same_texts(self, when: str, count: int) -> None:
        """One prompt in turn until each engine has answered: one text."""
        body = self.clients.body() | {"stream": False}
        del body["stream_options"]
        at_first = self.engines.count("requests_received_total")
        texts: Counter[str] = Counter()
        answered: dict[str, int] = {}
        while len(answered) < count and texts.total() < MOST_ASKED:
            # As many as engines, then the count: what takes turns is asked for the page as well,
            # and one question between two pages would go to the same engine each time.
            texts.update(self.engines.complete(body) for _ in range(count))
            now = self.engines.count("requests_received_total")
            answered = {n: now[n] - at_first.get(n, 0) for n in now if now[n] > at_first.get(n, 0)}
        self.facts[f"answered {when}"] = answered
        self.expect(len(answered) == count, f"{when}: only {sorted(answered)} answered")
        self.expect(len(texts) == 1, f"{when}: {len(texts)} texts of one prompt")

    def rates(self, count: int, streams: int, when: str) -> None:
        """All streams at once, some times."""
        found = []
        for turn in range(self.args.warmup + self.args.repeats):
            values = measured(self.clients(streams))
            if turn >= self.args.warmup:
                found.append(values)
        case = {"engines": count, "streams": streams, "when": when}
        for name, unit in UNITS.items():
            self.keep(case, name, unit, [values[name] for values in found], self.args.warmup)

    def kill(self, count: int, streams: int) -> None:
        """An engine dies while all streams are being read."""
        ends = self.clients.begin(streams, self.args.long)
        all_run = until(lambda: sum(self.engines.running().values()) == streams, 10)
        self.expect(all_run is not None, f"{streams} streams never ran all at once")
        time.sleep(self.args.kill_after)
        spread, victim = self.engines.running(), max(self.engines.pids())
        os.kill(victim, signal.SIGKILL)
        self.killed = killed = time.perf_counter()
        time.sleep(SETTLE_S)
        next_ones = self.clients.begin(streams // count, self.args.out)
        first, rest = next_ones(), ends()
        living = self.engines.running()
        gone = sorted(spread.keys() - living.keys())
        self.keep_deaths(spread, gone, rest)
        self.expect(len(gone) == count - len(living) == 1, f"{gone} away after a death")
        errors = Counter(record.error for record in first if record.error)
        self.expect(not errors, f"asked after the death: {dict(errors)}")
        waited = [record.event_times[0] - record.sent for record in first if record.event_times]
        if waited:
            case = {"engines": count - 1, "streams": len(first), "when": f"{SETTLE_S} s after"}
            self.keep(case, "ttft", "s", [percentile(waited, 0.5)], 0)
        going_on = max((r.event_times[-1] for r in rest if r.error is None), default=killed)
        self.facts["went_on_for_s"] = round(going_on - killed, 3)

    def keep_deaths(
        self, spread: dict[str, int], gone: list[str], ends: Sequence[StreamRecord]
    ) -> None:
        """How the streams ended that were open when an engine died."""
        whole = sum(r.error is None and r.finish == "length" for r in ends)
        told = Counter(r.error for r in ends if r.error is not None)
        self.facts["death"] = {"spread": spread, "gone": gone, "whole": whole, "told": dict(told)}
        least = sum(spread.values()) // len(spread)
        self.expect(min(spread.values()) > 0.7 * least, f"spread unevenly: {spread}")
        self.expect(whole + told.total() == len(ends), f"{len(ends)} streams, other ends: {told}")
        lost = sum(spread.get(name, 0) for name in gone)
        self.expect(0 < told.total() <= lost, f"{told.total()} told of an error, {lost} were lost")

    def back(self, count: int, before: set[int]) -> None:
        """The dead one is started again."""
        seconds = until(
            lambda: (
                len(self.engines.running()) == count
                and len(self.engines.pids() - before) == 1
                and fetch_json(f"{self.args.url.rstrip('/')}/health/ready")
            ),
            self.args.wait,
        )
        self.facts["back_after_s"] = round(time.perf_counter() - self.killed, 1)
        self.expect(seconds is not None, f"not back within {self.args.wait:g} s")

    def keep(
        self, case: dict[str, Any], metric: str, unit: str, raw: list[float], warmup: int
    ) -> None:
        row = make_row(case, metric, unit, raw, warmup)
        self.rows.append(row)
        print(f"{case}: {metric} {row['median']:.4f} {unit}", flush=True)

    def expect(self, right: bool, otherwise: str) -> None:
        if not right:
            self.wrong.append(otherwise)
            print(f"WRONG {otherwise}", flush=True)


def measure(args: argparse.Namespace, clients: Clients) -> Bench:
    """The bench, done; what broke it off is in `wrong`. Raises BenchError where not several
    engines are ready: nobody is killed then."""
    status, engines = wait_for_server(args), Engines(args.url)
    count, bench = status["config"]["num_engines"], Bench(engines, clients, args)
    clients.model = status["model"]["name"]
    clients.prompts = Prompts(status["model"]["vocab_size"], seed=1)
    bench.facts["server"] = status
    if count < 2:
        raise BenchError("the server has one engine; start it with engine: {num_engines: 2}")
    if until(lambda: len(engines.running()) == count, args.wait) is None:
        raise BenchError(f"not all of {count} engines answer within {args.wait:g} s")
    try:
        bench.run(count)
    except (OSError, RuntimeError) as error:
        bench.wrong.append(f"broken off: {error}")
    return bench


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = build_parser().parse_args(argv)
    args.gap_ms = 0.0
    clients = Clients(args)
    try:
        bench = measure(args, clients)
    finally:
        clients.close()
    switches = {name: value for name, value in vars(args).items() if name not in ("note", "output")}
    switches |= bench.facts | {"wrong": bench.wrong}
    if bench.rows:
        write_record(make_record("two_engines", switches, bench.rows, args.note), args.output)
    seen = {name: value for name, value in bench.facts.items() if name != "server"}
    print(json.dumps(seen))
    print("\n".join(f"WRONG {line}" for line in bench.wrong), end="\n" * bool(bench.wrong))
    return int(bool(bench.wrong))


if __name__ == "__main__":
    sys.exit(main())
