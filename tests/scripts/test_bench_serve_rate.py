"""The bench of rates through HTTP: what a rate is, how paths are paired, what breaks promises."""

from __future__ import annotations

import itertools

import pytest

import bench_serve_rate
from bench_serve_rate import (
    Twin,
    build_parser,
    engine_like,
    loads_of,
    measure,
    require_same_settings,
    through_engine,
)
from engine_actor.loop import Heartbeat
from engine_actor.status import engine_status
from engine_runs import BenchError, EngineRun, engine_of
from results import make_record, validate
from serve_rate_rows import TWIN, measured, rows_of, table, verdict
from sse_client import StreamRecord

ARGS = build_parser().parse_args(
    "--checkpoint x --output x --streams 1,2 --repeats 2 --warmup 1".split()
)


def stream(sent: float, *times: float, tokens: int | None = None) -> StreamRecord:
    return StreamRecord(sent, list(times), len(times) if tokens is None else tokens, 4)


def test_the_decode_rate_is_of_the_time_in_which_all_decode():
    early = stream(0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    late = stream(0.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    found = measured([early, late])
    # After 2 and up to 5: three of each.
    assert found["decode_tokens_per_second"] == 2.0
    assert found["text_tokens_per_second"] == pytest.approx(10 / 6)
    assert (found["ttft"], found["ttft_mean"], found["longest_gap"]) == (1.5, 1.5, 1.0)
    assert found["tokens_per_event"] == 1.0


def test_tokens_that_come_together_count_at_that_moment():
    found = measured([stream(0.0, 1.0, 2.0, 3.0, 5.0, tokens=8)])
    assert found["decode_tokens_per_second"] == pytest.approx(6 / 4)
    assert found["text_tokens_per_second"] == pytest.approx(8 / 5)
    assert found["tokens_per_event"] == 2.0


def paths(http_seconds: float, later: float):
    """An engine that makes a token a second, and HTTP at another pace."""
    order = []

    def send(name, seconds, late):
        def go(streams):
            order.append((name, streams))
            return [stream(0.0, *(late + i * seconds for i in range(1, 9))) for _ in range(streams)]

        return go

    made = {"engine": send("engine", 1.0, 0.0), "http": send("http", http_seconds, later)}
    return made, order


def test_paths_take_turns_and_are_compared_inside_a_repetition():
    made, order = paths(1.0 / 0.9, -1.0 / 0.9 + 1.004)
    rows = rows_of(measure(made, ARGS), ARGS.warmup, ARGS.out)
    assert order == [("engine", 1), ("http", 1), ("engine", 2), ("http", 2)] * 3
    validate(make_record("serve_rate", {}, rows))
    share = [row for row in rows if row["metric"] == "decode_share"]
    assert [row["raw"] for row in share] == [[0.9, 0.9], [0.9, 0.9]]
    added = [row for row in rows if row["metric"] == "ttft_added"]
    assert added[0]["raw"] == pytest.approx([0.004, 0.004])
    assert verdict(rows) == []
    first = "1 streams of 128 tokens: decode        1 of        1 tokens/s (90%)"
    assert table(rows).lstrip().startswith(first)


def test_further_loads_in_the_same_record():
    args = build_parser().parse_args(
        "--checkpoint x --output x --streams 1,16 --also 64:512:2 8:32:1".split()
    )
    found = [(load.streams, load.out, load.repeats, load.prompt) for load in loads_of(args)]
    assert found == [([1, 16], 128, 5, 512), ([64], 512, 2, 512), ([8], 32, 1, 512)]


def test_broken_promises_are_named():
    made, _ = paths(2.0, 0.0)
    assert verdict(rows_of(measure(made, ARGS), ARGS.warmup, ARGS.out)) == [
        "BROKEN 1 streams of 128 tokens: 50% of the engine's tokens/s",
        "BROKEN 1 streams of 128 tokens: the first token 1000.00 ms later",
        "BROKEN 2 streams of 128 tokens: 50% of the engine's tokens/s",
        "BROKEN 2 streams of 128 tokens: the first token 1000.00 ms later",
    ]


TINY = ["--checkpoint", "random:tiny", "--device", "cpu", "--output", "x"]
OTHER = "--set prefill_chunk_tokens=48 --set kv.budget_mb=1 --set kv.prefix_cache=false".split()


def test_the_engine_has_the_servers_settings():
    """Also those that the server decided for itself."""
    theirs = engine_of(build_parser().parse_args([*TINY, *OTHER, "--set", "cpu_threads=1"]))
    status = engine_status(theirs, 1, Heartbeat(True, 0.0, 0, None), 0)
    status["config"] |= {"num_engines": 2, "device": "cuda"}
    ours = engine_like(build_parser().parse_args(TINY), status)
    require_same_settings(ours, status)
    assert ours.config.prefill_chunk_tokens == 48
    assert ours.config.kv.budget_mb == 1
    assert not ours.config.kv.prefix_cache
    other = engine_like(build_parser().parse_args([*TINY, "--set", "kv.budget_mb=2"]), status)
    with pytest.raises(BenchError, match=r"kv .*'budget_mb': 1.*; \d+ KV blocks, not"):
        require_same_settings(other, status)


def test_requests_that_come_one_after_another():
    """Each waits from the moment it was sent, whatever the engine was doing then."""
    args = build_parser().parse_args([*TINY, *SHORT])
    run = EngineRun(engine_of(args))
    records = through_engine(run, args, [0.0, 0.02, 0.04])
    gaps = [b.sent - a.sent for a, b in itertools.pairwise(records)]
    assert gaps == pytest.approx([0.02, 0.02])
    assert [record.tokens for record in records] == [4, 4, 4]
    assert all(record.event_times[0] > record.sent for record in records)
    late = through_engine(run, args, [0.0, 0.001], [0.01, 0.05])
    assert late[1].sent - late[0].sent == pytest.approx(0.001)
    assert late[1].event_times[0] - late[0].sent > 0.05


SHORT = ["--prompt", "8", "--out", "4", "--set", "kv.budget_mb=1"]


def test_the_twin_gets_its_requests_when_the_server_did(monkeypatch):
    args = build_parser().parse_args([*TINY, *SHORT])
    answers = {"queue": {"arrivals": [4.0, 5.03, 5.01]}}
    monkeypatch.setattr(bench_serve_rate, "fetch_json", lambda url: answers)
    sent = [stream(5.001, 6.0), stream(5.0, 6.5)]
    twin = Twin(EngineRun(engine_of(args)), lambda streams: sent, args)
    assert twin.http(2) is sent
    first, second = twin(2)
    assert second.sent - first.sent == pytest.approx(0.001)
    assert first.event_times[0] - first.sent > 0.01
    assert second.event_times[0] - first.sent > 0.03
    answers["queue"]["arrivals"].append(5.5)
    with pytest.raises(BenchError, match="got 3 requests, not 2"):
        twin.http(2)


def test_what_http_adds_to_the_twin_is_told_and_not_judged():
    made, _ = paths(1.0, 0.004)
    made[TWIN] = lambda n: [stream(0.0, 0.99, 2.0) for _ in range(n)]
    made["engine"] = lambda n: [stream(0.0, 1.003, 2.0) for _ in range(n)]
    rows = rows_of(measure(made, ARGS), ARGS.warmup, ARGS.out)
    over = {r["case"]["path"]: r["median"] for r in rows if r["metric"] == "ttft_added"}
    assert over == pytest.approx({"http - engine": 0.001, "http - twin": 0.014})
    assert "over its twin +14.00" in table(rows)
    late = [
        dict(row, median=0.006) if row["case"]["path"] == "http - twin" else row for row in rows
    ]
    assert verdict(late) == verdict(rows)


def test_a_time_in_which_not_all_decode_is_not_judged():
    made, _ = paths(1.0, 0.0)
    one, most = made["http"], ARGS.streams[-1]
    made["http"] = lambda n: [*one(n)[: most - 1], stream(0.0, 9.0, 10.0)] if n == most else one(n)
    rows = rows_of(measure(made, ARGS), ARGS.warmup, ARGS.out)
    share = next(r for r in rows if r["metric"] == "decode_share" and r["case"]["streams"] == most)
    assert share["raw"] == [0.0, 0.0]
    assert all("engine's tokens/s" not in line for line in verdict(rows))
