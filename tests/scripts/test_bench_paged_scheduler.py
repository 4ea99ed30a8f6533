"""The seed's concurrency bench: its command as written, its fields, its counts (S-70, S-71)."""

from __future__ import annotations

import json

import pytest

import bench_paged_scheduler
from bench_paged_scheduler import COUNTERS, METRICS, measured
from engine_runs import BenchError, Request
from results import make_record, make_row, validate

SEED = (
    "--backend w4a16 --max-new-tokens 16 --max-cache 128 --prefill-chunk-tokens 32 "
    "--concurrency 1,2,4 --reserve-memory-mb 384 --no-prefix-cache"
).split()
HERE = ["--checkpoint", "random:tiny", "--device", "cpu", "--set", "cpu_threads=1"]


@pytest.mark.parametrize("switch", [[], ["--no-prefill-decode-overlap"]])
def test_the_seeds_command_runs_as_written(switch, tmp_path, capsys):
    out = tmp_path / "paged.json"
    argv = [*HERE, *SEED, *switch, "--output", str(out)]
    assert bench_paged_scheduler.main(argv) == 0
    record = json.loads(out.read_text())
    validate(record)
    assert record["prefill_decode_overlap"] is (not switch)
    runs = record["runs"]
    assert len(runs) == 3 * 5
    assert all(set(run) == {"concurrency", "repeat", *METRICS, *COUNTERS} for run in runs)
    # A prompt is one chunk and one prompt a step: as the seed counted, 0, 1 and 3.
    logical = {run["concurrency"]: run["prefill_decode_overlap_steps"] for run in runs}
    assert logical == {1: 0, 2: 1, 4: 3}
    assert {run["concurrency"]: run["prefill_steps_total"] for run in runs} == {1: 1, 2: 2, 4: 4}
    assert all(run["prefill_decode_stream_overlap_steps"] == 0 for run in runs)  # a CPU has none
    engine = record["switches"]["engine"]
    assert engine["reserve_memory_mb"] == 384
    assert engine["prefill_chunk_tokens"] == 32
    assert engine["kv"]["prefix_cache"] is False
    assert engine["enable_prefill_decode_overlap"] is (not switch)
    assert record["switches"]["facts"]["max_model_len"] == 128
    assert capsys.readouterr().out.startswith("c1: ")


def test_a_run_is_summarised_from_the_times_of_its_tokens():
    first = Request(1, 4, sent=0.0, times=[1.0, 1.5, 2.0, 3.0], tokens=[5] * 4)
    second = Request(2, 4, sent=0.0, times=[2.0, 3.0, 4.0, 4.5], tokens=[6] * 4)
    found = measured([first, second], seconds=4.0)
    assert found["tokens_per_second"] == 2.0
    assert found["ttft_p50_s"] == 1.5
    assert found["ttft_p95_s"] == pytest.approx(1.95)
    assert found["tpot_p50_s"] == pytest.approx((2 / 3 + 2.5 / 3) / 2)
    assert found["max_itl_s"] == 1.0
    assert found["inter_token_jitter_s"] == pytest.approx(1.0 - 0.75)


def test_what_cannot_fit_or_is_not_there_is_refused(tmp_path):
    out = ["--output", str(tmp_path / "x.json")]
    with pytest.raises(BenchError, match="--max-cache 128: a request needs 216 tokens"):
        bench_paged_scheduler.main([*HERE, *SEED, *out, "--prompt-tokens", "200"])
    with pytest.raises(BenchError, match="--backend fp16"):
        bench_paged_scheduler.main([*HERE, *SEED, *out, "--backend", "fp16"])
    with pytest.raises(SystemExit):
        bench_paged_scheduler.main([*HERE, *SEED, *out, "--concurrency", "0"])


def test_only_the_seeds_benches_have_the_seeds_fields():
    row = make_row({}, "m", "s", [1.0], 0)
    validate(make_record("a", {}, [row], seed={"prefill_decode_overlap": True, "runs": []}))
    with pytest.raises(ValueError, match=r"record.prefill_decode_overlap is int"):
        validate(make_record("a", {}, [row], seed={"prefill_decode_overlap": 1}))
    with pytest.raises(ValueError, match=r"record.other is not part"):
        validate(make_record("a", {}, [row], seed={"other": 1}))
