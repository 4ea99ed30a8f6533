"""The soak: a healthy engine passes under faults and cancels, and each kind of damage is told."""

from __future__ import annotations

import json

import pytest

import soak
from engine_actor.messages import Flag
from engine_runs import EngineRun, Request, engine_of
from memory_use import growth, slope
from results import validate
from soak_record import memory_trends, process_mib

SIZE = "--rate 60 --most-prompt 120 --most-out 20 --max-model-len 256 --fault-rate 12 --seconds 1.2"
ARGS = ["--checkpoint", "random:tiny", "--device", "cpu", "--quiet-every", "0.4", *SIZE.split()]
ARGS += ["--set", "kv.budget_mb=1", "--set", "cpu_threads=1", "--set", "max_num_seqs=8"]


@pytest.fixture
def soaked(tmp_path):
    """A soak of an idle engine, so that a test can damage it."""
    args = soak.build_parser().parse_args([*ARGS, "--output", str(tmp_path / "x.json")])
    engine = engine_of(args, {"faults": [soak.NEVER]}, max_model_len=256)
    found = soak.Soak(EngineRun(engine), args)
    found.quiet(0.0)
    return found


def test_a_healthy_engine_passes(tmp_path, capsys):
    out = tmp_path / "soak.json"
    assert soak.main([*ARGS, "--output", str(out)]) == 0
    record = json.loads(out.read_text())
    validate(record)
    counts, verdict = record["switches"]["counts"], record["switches"]["verdict"]
    assert (verdict["passed"], verdict["wrong"]) == (True, [])
    assert verdict["leaked"] == {"blocks": 0, "sequences": 0}
    assert verdict["lost"] == {"requests": 0, "tokens": 0}
    assert verdict["fixed_texts"] == {"compared": counts["periods"] + 1, "different": 0}
    assert set(verdict["memory"]) == {"device_mib", "host_mib", "other_mib"}
    assert counts["requests"] == sum(counts["ends"].values()) > 0
    assert set(counts["ends"]) <= {"LENGTH", "CANCELLED", "OOM"}
    assert {row["metric"] for row in record["rows"]} == {
        "tokens_per_second",
        "device_memory",
        "host_memory",
        "reserved_memory",
        "kv_pool",
        "other_memory",
    }
    assert "wrong: []" in capsys.readouterr().out


def told(found):
    """What is wrong, beside what a soak of no seconds cannot have met."""
    return [line for line in found.verdict()["wrong"] if line not in soak.unproved(found)]


def test_an_idle_engine_has_nothing_wrong(soaked):
    assert told(soaked) == []
    assert soaked.ends == {"LENGTH": 1}


def test_a_request_that_never_ended_is_told(soaked):
    soaked.run.requests[99] = Request(99, 4, 0.0)
    soaked.submitted += 1
    soaked.quiet(1.0)
    assert soaked.wrong == ["request 99 ended nothing (None)"]


def test_a_cancel_that_nobody_asked_for_is_told(soaked):
    soaked.run.requests[99] = Request(99, 4, 0.0, end=Flag.CANCELLED)
    soaked.quiet(1.0)
    assert soaked.wrong == ["request 99 was cancelled by nobody"]


def test_a_leaked_block_is_told(soaked, monkeypatch):
    pool = soaked.run.engine.kv
    monkeypatch.setattr(type(pool), "n_free", property(lambda kv: kv.capacity - 2))
    monkeypatch.setattr(pool, "check", lambda sequences: None)
    monkeypatch.setattr(soaked.run.engine.scheduler, "check", lambda: None)
    soaked.quiet(1.0)
    assert f"2 of {pool.capacity} blocks are not free" in soaked.wrong


def test_another_text_of_the_fixed_prompt_is_told(soaked):
    soaked._golden = [1, 2, 3]
    soaked.quiet(1.0)
    assert len(soaked.wrong) == 1
    assert soaked.wrong[0].endswith("the fixed prompt gave another text")


def test_tokens_that_nobody_heard_are_told(soaked):
    soaked.run.engine.metrics.add("generation_tokens_total", 5)
    assert told(soaked) == ["29 tokens were made, 24 heard"]
    assert soaked.verdict()["lost"] == {"requests": 0, "tokens": 5}


def test_a_soak_without_faults_and_cancels_proves_nothing(soaked):
    assert soak.unproved(soaked) == ["no fault fired", "nobody was cancelled"]
    soaked.args.fault_rate = soaked.args.cancel_share = 0
    assert soak.unproved(soaked) == []


def quiets_of(name: str, *values: float) -> list[soak.Quiet]:
    """One a minute."""
    return [
        soak.Quiet(60.0 * i, 0, 1.0, **{"device_mib": 0.0, "host_mib": 0.0, name: value})
        for i, value in enumerate(values)
    ]


def test_growing_memory_is_told(soaked):
    soaked.quiets = soaked.quiets + quiets_of("host_mib", 100, 120, 130, 200)
    assert told(soaked) == ["host_mib grew by 100.0 MiB, 64 are allowed"]
    assert not soaked.verdict()["passed"]
    assert growth([5, 9, 1, 1, 1, 8]) == -1
    assert growth([1, 100]) == 0


def test_memory_that_rises_from_below_its_first_peak_is_told():
    rising = quiets_of("device_mib", 50, 50, 50, 0, 8, 16, 24, 32, 40)
    trends, wrong = memory_trends(rising, {"device_mib": 16.0})
    assert wrong == ["device_mib rises by 8.00 MiB a minute"]
    assert trends["device_mib"]["grown"] == -10
    assert memory_trends(rising, {"device_mib": 41.0})[1] == []
    assert slope([0, 1, 2], [3, 5, 7]) == 2
    assert slope([1, 1], [0, 5]) == 0


def test_what_lies_outside_of_torch_and_the_pool_counts():
    (quiet,) = quiets_of("process_mib", 900)
    quiet.reserved_mib, quiet.pool_mib = 300, 200
    assert quiet.other_mib == 400
    quiet.process_mib = 0.0
    assert quiet.other_mib == 0
    assert process_mib() == 0
