"""The seed's insertion bench: its command, its fields, what counts as disturbed, promises (S-72,
S-80, S-113)."""

from __future__ import annotations

import json
import weakref

import pytest

import bench_tpot_jitter
from bench_tpot_jitter import ALL_COUNTERS, METRICS, broken_promises, build_parser, measured
from engine_runs import BenchError, Request
from results import validate

SEED = "--backend w4a16 --max-cache 256 --max-new-tokens 12 --chunk-sizes 128 --long-repeat 8"
HERE = ["--checkpoint", "random:tiny", "--device", "cpu", "--set", "cpu_threads=1"]


def run(tmp_path, *more):
    out = tmp_path / "jitter.json"
    code = bench_tpot_jitter.main([*HERE, *SEED.split(), *more, "--output", str(out)])
    record = json.loads(out.read_text())
    validate(record)
    return code, record


def test_the_seeds_command_runs_as_written(tmp_path, capsys):
    code, record = run(tmp_path)
    assert code == 0
    assert record["prefill_decode_overlap"] is True
    runs = record["runs"]
    assert len(runs) == 5
    fields = {"mode", "chunk_tokens", "repeat", *METRICS, *ALL_COUNTERS}
    assert all(set(one) == fields for one in runs)
    # 192 tokens in chunks of 128, beside a stream that decodes.
    assert all(one["prefill_steps_total"] == 2 for one in runs)
    assert all(one["prefill_decode_overlap_steps"] == 2 for one in runs)
    assert all(one["max_itl_s"] >= one["itl_p95_s"] >= one["itl_p50_s"] > 0 for one in runs)
    assert capsys.readouterr().out.startswith("serial chunk 128: ")


def test_without_overlap_and_with_chunks_of_several_sizes(tmp_path):
    code, record = run(
        tmp_path,
        "--no-prefill-decode-overlap",
        "--chunk-sizes",
        "64,192",
        "--repeats",
        "1",
        "--streams",
        "3",
    )
    assert code == 0
    assert record["prefill_decode_overlap"] is False
    assert [(one["chunk_tokens"], one["prefill_steps_total"]) for one in record["runs"]] == [
        (64, 3),
        (192, 1),
    ]


def test_the_engine_of_a_mode_is_gone_before_the_next_is_built(tmp_path, monkeypatch):
    """Two engines of 3B would not fit on the card together."""
    build, built = bench_tpot_jitter.build, []

    def alone(args, mode):
        assert [one for one in built if one() is not None] == []
        engine = build(args, mode)
        built.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(bench_tpot_jitter, "build", alone)
    _, record = run(tmp_path, "--repeats", "1", "--overlap-modes", "serial", "mixed")
    assert [one["mode"] for one in record["runs"]] == ["serial", "mixed"]


def test_a_broken_promise_is_named_and_ends_with_code_1(tmp_path, capsys):
    kept = ["--max-itl-ms", "1e9", "--p95-tpot-ms", "1e9", "--ttft-ms", "1e9", "--repeats", "1"]
    assert run(tmp_path, *kept)[0] == 0
    assert "BROKEN" not in capsys.readouterr().out
    for flag, name in (("--max-itl-ms", "max_itl"), ("--p95-tpot-ms", "tpot_p95")):
        assert run(tmp_path, *kept, flag, "0.0001")[0] == 1
        assert f"BROKEN serial, chunk 128: {name} " in capsys.readouterr().out


def test_one_repetition_above_the_promise_breaks_it():
    args = build_parser().parse_args([*HERE, "--output", "x", "--ttft-ms", "200"])
    case = {"mode": "serial", "chunk_tokens": 128, "max_itl_s": 1.0, "tpot_p95_s": 1.0}
    assert broken_promises([case | {"ttft_s": 0.2}], args) == []
    assert broken_promises([case | {"ttft_s": 0.1}, case | {"ttft_s": 0.3}], args) == [
        "BROKEN serial, chunk 128: ttft 300.00 ms, at most 200 was promised"
    ]


def test_only_what_ends_while_the_prompt_comes_in_is_disturbed():
    long = Request(9, 100, sent=10.0, times=[14.0, 15.0])
    stream = Request(1, 4, sent=0.0, times=[7.0, 8.0, 9.5, 11.0, 13.0, 14.0, 14.5])
    late = Request(2, 4, sent=0.0, times=[8.0, 9.0, 10.5, 14.0, 15.0])
    found = measured([stream, late], long)
    # Of the first 1.5, 2 and 1; of the second 1.5 and 3.5.
    assert found["max_itl_s"] == 3.5
    assert found["itl_p50_s"] == 1.5
    assert found["ttft_s"] == 4.0
    assert found["tpot_p50_s"] == pytest.approx((1.5 + 2.5) / 2)
    assert found["undisturbed_itl_p50_s"] == 1.0  # of 1, 1.5 and 1
    with pytest.raises(BenchError, match="no stream made a token"):
        measured([], long)


def test_a_long_request_that_cannot_fit_is_refused(tmp_path):
    with pytest.raises(BenchError, match="--max-cache 256: the long request needs 492 tokens"):
        run(tmp_path, "--long-repeat", "20")
