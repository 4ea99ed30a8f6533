"""The overhead bench: the difference is taken between medians of one repetition."""

from __future__ import annotations

import pytest

import bench_serve_overhead
from bench_serve_overhead import overhead_rows
from results import make_record, validate
from sse_client import StreamRecord


def _stream(sent: float, *times: float, error: str | None = None) -> StreamRecord:
    return StreamRecord(sent, list(times), len(times), 4, None, error)


RUNS = [
    {
        "engine": [_stream(0.0, 1.0, 1.5), _stream(10.0, 12.0, 12.5), _stream(20.0, 23.0, 23.5)],
        "http": [_stream(0.0, 1.25, 2.0), _stream(10.0, 12.25, 13.0), _stream(20.0, 29.0, 29.75)],
    },
    {
        "engine": [_stream(0.0, 4.0, 4.5)],
        "http": [_stream(0.0, 4.5, 5.5)],
    },
]


def test_the_overhead_is_a_difference_of_medians_inside_a_repetition():
    rows = {(row["metric"], row["case"]["path"]): row for row in overhead_rows(RUNS, 1)}
    assert rows["ttft_overhead", "http - engine"]["raw"] == [0.25, 0.5]
    assert rows["itl_overhead", "http - engine"]["raw"] == [0.25, 0.5]
    assert rows["ttft", "engine"]["raw"] == [1.0, 2.0, 3.0, 4.0]
    validate(make_record("serve_overhead", {}, list(rows.values())))


def test_both_paths_take_turns_and_a_failure_ends_the_bench():
    args = bench_serve_overhead.build_parser().parse_args(
        ["--output", "x", "--repeats", "2", "--warmup", "1"]
    )
    order = []

    def path(name):
        def send():
            order.append(name)
            return [_stream(0.0, 1.0, 2.0)]

        return send

    runs = bench_serve_overhead.measure(args, {"engine": path("engine"), "http": path("http")})
    assert order == ["engine", "http"] * 3
    assert len(runs) == 2
    with pytest.raises(RuntimeError, match="http: gone"):
        bench_serve_overhead.measure(args, {"http": lambda: [_stream(0.0, error="gone")]})


def test_tokens_that_arrive_together_make_the_bench_say_so(capsys):
    args = bench_serve_overhead.build_parser().parse_args(
        ["--output", "x", "--requests", "2", "--max-tokens", "4"]
    )
    alone = [_stream(0.0, 1.0, 2.0, 3.0, 4.0), _stream(0.0, 1.0, 2.0, 3.0, 4.0)]
    merged = [_stream(0.0, 1.0, 2.0, 3.0, 4.0), _stream(0.0, 2.0, 4.0)]
    assert bench_serve_overhead.heard_one_by_one([{"http": alone}], args)
    assert not bench_serve_overhead.heard_one_by_one([{"http": merged}], args)
    assert "only 4 of 6 tokens came alone" in capsys.readouterr().err
