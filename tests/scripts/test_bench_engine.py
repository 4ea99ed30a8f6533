"""The engine's bench: what is counted, what a twin changes, a valid result from a tiny model."""

from __future__ import annotations

import json

import pytest
import torch

import bench_engine
from engine_runs import BenchError, EngineRun, require_backend, settings_of
from gpu_time import metered_waits, summarise, union_seconds
from random_model import random_engine
from results import validate

TINY = ["--checkpoint", "random:tiny", "--device", "cpu", "--set", "kv.budget_mb=16"]
TINY += ["--set", "max_num_seqs=8", "--set", "cpu_threads=1"]


def size_of(row):
    return row["case"].get("streams", row["case"].get("tokens"))


def test_a_run_gives_a_valid_result_with_its_twin(tmp_path, capsys):
    out = tmp_path / "result.json"
    size = ["--streams", "1", "3", "--prompt", "20", "--out", "12", "--prefill", "40"]
    size += ["--ttft", "20", "7"]
    times = ["--prefill-many", "2", "--repeats", "2", "--warmup", "1", "--twin-repeats", "1"]
    twin = ["--twin", "small chunks", "prefill_chunk_tokens=8"]
    assert bench_engine.main([*TINY, *size, *times, *twin, "--output", str(out)]) == 0
    record = json.loads(out.read_text())
    validate(record)
    rows = {(row["case"]["engine"], row["metric"], size_of(row)): row for row in record["rows"]}
    ours = bench_engine.OURS
    assert rows[ours, "decode_tokens_per_second", 3]["n"] == 2
    assert rows["small chunks", "decode_tokens_per_second", 3]["n"] == 1
    assert rows[ours, "prefill", 40]["unit"] == "ms"
    assert rows[ours, "prefill_tokens_per_second", 80]["n"] == 2
    assert rows[ours, "ttft", 20]["n"] == rows[ours, "ttft", 7]["n"] == 10
    # Twelve tokens, the first before the window opens: eleven steps each repetition.
    assert rows[ours, "step", 1]["n"] == 22
    assert record["switches"]["engine of small chunks"]["prefill_chunk_tokens"] == 8
    assert record["switches"]["engine"]["prefill_chunk_tokens"] == 8192
    assert "3 streams" in capsys.readouterr().err


def test_settings_are_nested_by_their_dots():
    pairs = ["kv.dtype=int8", "kv.budget_mb=64", "enable_prefill_decode_overlap=false"]
    assert settings_of(pairs) == {
        "kv": {"dtype": "int8", "budget_mb": 64},
        "enable_prefill_decode_overlap": False,
    }
    with pytest.raises(BenchError, match="no = in it"):
        settings_of(["kv.dtype"])


def test_a_backend_must_be_what_the_checkpoint_holds():
    kinds = "random: 2 x W8 group -1, 56 x W4 group 128, 56 x W3 group 128"
    for backend in ("auto", "mixed", "w4a16", "w3a16"):
        require_backend(backend, kinds)
    with pytest.raises(BenchError, match="--backend fp16: the checkpoint holds random"):
        require_backend("fp16", kinds)
    require_backend("fp16", "dense: 3 dense")
    with pytest.raises(BenchError):
        require_backend("w4a16", "dense: 3 dense")


def test_every_token_has_the_time_of_its_step():
    clock = iter(range(10_000))
    engine = random_engine("tiny", {"device": "cpu", "kv": {"budget_mb": 8}, "cpu_threads": 1})
    run = EngineRun(engine, clock=lambda: float(next(clock)))
    request = run.submit(10, 4)
    run.finish()
    assert len(request.times) == len(request.tokens) == 4
    assert request.ttft > 0
    assert request.tpot == pytest.approx(sum(request.gaps) / 3)
    assert run.offer(10_000, 4) is None
    assert sum(run.refused.values()) == 1
    with pytest.raises(BenchError, match="ran out of work"):
        run.until(lambda: False)


def test_busy_time_is_the_union_of_the_kernels():
    assert union_seconds([(0, 2), (1, 3), (5, 6), (5.2, 5.4)]) == 4
    found = summarise([("a", 0, 2e6), ("b", 1e6, 3e6), ("a", 5e6, 6e6)], steps=2)
    assert found.busy == 2.0
    assert found.launches == 1.5
    assert found.names == (("a", 1.5, 1.0), ("b", 1.0, 0.5))


def test_waits_are_metered_and_put_back():
    before = torch.Tensor.tolist, torch.cuda.Event.synchronize
    with metered_waits() as meter:
        assert torch.ones(2).tolist() == [1, 1]
        assert meter.seconds == 0  # the tensor is on the CPU: nobody waited
        meter.timed(lambda: sum(range(1000)))()
        assert meter.seconds > 0
    assert (torch.Tensor.tolist, torch.cuda.Event.synchronize) == before
    assert "tolist" not in torch.Tensor.__dict__
