"""The HTTP bench: right figures from scripted records, and a whole sweep against a fake server."""

from __future__ import annotations

import asyncio
import json

import pytest

import bench_http
from results import validate
from sse_client import StreamRecord
from tests.scripts.fake_sse_server import FakeServer, chunk, usage


def _record(sent, times, tokens=None, error=None):
    return StreamRecord(sent, list(times), tokens or len(times), 5, "length", error)


def test_latencies_of_scripted_streams():
    records = [
        _record(0.0, [1.0, 1.5, 2.5]),
        _record(2.0, [2.25, 3.25], tokens=5),  # five tokens came in two events
        _record(0.0, [9.0], error="HTTP 500"),
        _record(4.0, [6.0]),
    ]
    assert bench_http.latencies(records) == {
        "ttft": [1.0, 0.25, 2.0],
        "e2e": [2.5, 1.25, 2.0],
        "itl": [0.5, 1.0, 1.0],
        "tpot": [0.75, 0.25],
    }


def test_rates_are_per_run_and_latencies_are_pooled():
    runs = [([_record(0.0, [1.0, 2.0])], 4.0), ([_record(0.0, [3.0, 4.0], tokens=4)], 2.0)]
    rows = {row["metric"]: row for row in bench_http.rows_of_level({"concurrency": 1}, runs, 1)}
    assert rows["output_tokens_per_second"]["raw"] == [0.5, 2.0]
    assert rows["requests_per_second"]["raw"] == [0.25, 0.5]
    assert rows["ttft"]["raw"] == [1.0, 3.0]
    assert rows["ttft"]["median"] == 2.0
    assert rows["tpot"]["raw"] == [1.0, pytest.approx(1 / 3, abs=1e-6)]


def test_failed_requests_count_in_no_rate():
    runs = [([_record(0.0, [1.0]), _record(0.0, [], error="HTTP 429")], 2.0)]
    rows = {row["metric"]: row for row in bench_http.rows_of_level({"concurrency": 2}, runs, 0)}
    assert rows["requests_per_second"]["raw"] == [0.5]


def test_prompts_share_no_prefix_and_have_the_wanted_length():
    prompts = [bench_http.prompt_text(number, 20) for number in range(50)]
    assert len({prompt.split()[1] for prompt in prompts}) == 50
    assert {len(prompt.split()) for prompt in prompts} == {21}


@pytest.fixture
def sweep_result(tmp_path):
    """A whole sweep of 1 and 3 streams against a fake server: (exit code, result, bodies, peak)."""

    async def serve_and_run():
        async with FakeServer([chunk("a"), chunk("b", "length"), usage(4, 2)]) as server:
            base = server.url.removesuffix("/v1/completions")
            output = tmp_path / "result.json"
            argv = ["--url", base, "--model", "m", "--concurrency", "1,3", "--repeats", "2"]
            argv += ["--requests-per-stream", "2", "--label", "fake", "--output", str(output)]
            argv += ["--api-key", "secret", "--body", '{"min_tokens": 2}']
            code = await asyncio.to_thread(bench_http.main, argv)
            return code, json.loads(output.read_text()), server.bodies, server.most_open

    return asyncio.run(serve_and_run())


def test_a_sweep_writes_a_valid_result(sweep_result):
    code, record, bodies, peak = sweep_result
    assert code == 0
    validate(record)
    # two levels, three runs each (one to warm up), two requests a stream
    assert len(bodies) == 3 * 2 * (1 + 3)
    assert 1 <= peak <= 3
    by_case = {(row["case"]["concurrency"], row["metric"]): row for row in record["rows"]}
    assert by_case[1, "ttft"]["n"] == 4
    assert by_case[3, "ttft"]["n"] == 12
    assert by_case[3, "output_tokens_per_second"]["n"] == 2


def test_every_switch_is_in_the_result_but_the_key(sweep_result):
    _, record, bodies, _ = sweep_result
    switches = record["switches"]
    assert (switches["model"], switches["label"], switches["repeats"]) == ("m", "fake", 2)
    assert "secret" not in json.dumps(record)
    assert bodies[0]["min_tokens"] == 2
    assert bodies[0]["ignore_eos"] is True
    assert bodies[0]["stream_options"] == {"include_usage": True}


def test_failures_give_exit_code_1(tmp_path, capsys):
    async def serve_and_run():
        async with FakeServer([chunk("a"), {"error": {"message": "gone"}}]) as server:
            base = server.url.removesuffix("/v1/completions")
            argv = ["--url", base, "--model", "m", "--concurrency", "1", "--repeats", "1"]
            argv += ["--warmup", "0", "--requests-per-stream", "2"]
            return await asyncio.to_thread(
                bench_http.main, [*argv, "--output", str(tmp_path / "out.json")]
            )

    assert asyncio.run(serve_and_run()) == 1
    assert "failed (2x): gone" in capsys.readouterr().err


@pytest.mark.slow
def test_the_plot_is_a_png(tmp_path):
    from plot_http import plot, points
    from results import make_record

    runs = [([_record(0.0, [1.0, 2.0])], 4.0)]
    rows = [
        row for level in (4, 1) for row in bench_http.rows_of_level({"concurrency": level}, runs, 0)
    ]
    record = make_record("http", {"label": "ours"}, rows)
    assert points(record, "ttft", "median") == ([1, 4], [1.0, 1.0])
    plot([record], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
