"""The sweep of a nearly full card: predictions are tried at their edge, texts are those of a prompt
alone but for near ties (S-104, S-114)."""

from __future__ import annotations

import json
import sys

import pytest

import bench_memory_sweep
from bench_memory_sweep import GRID, build_parser, ran_together, record_of, settings_of_cell
from engine_actor.core.plan import TokenLogprobs
from engine_runs import Request
from results import validate
from same_texts import Comparison, compare, summed
from steady_run import Steady, spread
from sweep_parts import run_part

SIZE = "--contexts 48 --concurrency 1,2 --chunk-sizes 32 --kv-dtypes auto --out 20 --repeats 2"
ARGS = ["--checkpoint", "random:tiny", "--device", "cpu", "--memory-limit-mb", "0"]
ARGS += ["--set", "kv.budget_mb=1", "--set", "cpu_threads=1"]


def test_cells_run_up_to_the_edge_that_the_plan_predicts(tmp_path, capsys):
    out = tmp_path / "sweep.json"
    argv = [*ARGS, *SIZE.split(), "--steady-seconds", "0.01", "--output", str(out)]
    assert bench_memory_sweep.main(argv) == 0
    record = json.loads(out.read_text())
    validate(record)
    blocks = record["switches"]["memory"]["auto 32 grid"]["kv_blocks"]
    grid = [row["case"] for row in record["rows"] if "steady" not in row["case"]]
    contexts = {(case["streams"], case["context"]) for case in grid}
    assert contexts == {(1, 48), (1, 16 * blocks), (2, 48), (2, 16 * (blocks // 2))}
    assert record["switches"]["texts"]["texts"] == 6
    assert record["switches"]["wrong"] == []
    steady = [row["metric"] for row in record["rows"] if "steady" in row["case"]]
    assert steady == ["tokens_per_second", "tpot_p95_s", "device_mib", "ended_at"]
    assert record["switches"]["whole"]
    assert capsys.readouterr().out.startswith("6 of 6 texts equal those alone")


def test_an_engine_that_dies_is_told_and_what_it_had_is_kept(tmp_path, monkeypatch, capsys):
    """The processes are stood in for: the first one is killed after a cell."""
    written = []

    def run(words, name, heard):
        argv = [*words[2:], "--output", str(tmp_path / "part.json")]
        assert bench_memory_sweep.main(argv) == 0
        found = json.loads((tmp_path / "part.json").read_text())
        heard(found)
        written.append(json.loads(out.read_text()))
        died = [f"{name}: died with code -11"] if "chunk 16" in name else []
        return found | {"wrong": found["wrong"] + died}

    monkeypatch.setattr(bench_memory_sweep, "run_part", run)
    out = tmp_path / "sweep.json"
    argv = [*ARGS, *SIZE.split(), "--chunk-sizes", "16,32", "--contexts", "40"]
    argv += ["--concurrency", "1", "--only", "grid", "--output", str(out)]
    assert bench_memory_sweep.main(argv) == 1
    assert "WRONG kv auto, chunk 16, grid: died with code -11" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert [row["case"]["chunk"] for row in record["rows"]] == [16] * 4 + [32] * 4
    assert record["switches"]["whole"]
    assert [one["switches"]["whole"] for one in written] == [False, False]
    assert [len(one["rows"]) for one in written] == [4, 8]


TELLS = """
import json, sys, time
path, last = sys.argv[sys.argv.index("--output") + 1], sys.argv[1]
open(path, "w").write(json.dumps({"wrong": ["a"], "rows": [1]}))
{then}
"""


def part_that(then):
    return [sys.executable, "-c", TELLS.replace("{then}", then), "x"]


def test_what_a_part_told_before_it_died_is_kept():
    heard = []
    found = run_part(part_that("raise SystemExit(3)"), "one", heard.append)
    assert found == {"wrong": ["a", "one: died with code 3"], "rows": [1]}
    assert heard == [{"wrong": ["a"], "rows": [1]}]


def test_a_part_that_ends_well_adds_nothing():
    assert run_part(part_that("pass"), "one") == {"wrong": ["a"], "rows": [1]}


def test_a_part_is_heard_while_it_runs_and_ends_with_who_listens():
    def heard(found):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_part(part_that("time.sleep(600)"), "one", heard, look_s=0.01)


def test_a_steady_run_that_slows_or_grows_is_told():
    steady = Steady()
    assert steady.wrong() == ["no repetition ended in time"]
    for i in range(8):
        steady.add(float(i), 100.0 - 2 * i, 0.01, 50.0 + i)
    assert steady.wrong() == [
        "99.0 -> 87.0 tokens/s",
        "torch holds 6.0 MiB more at the end",
    ]
    assert [row["metric"] for row in steady.rows({})][-1] == "ended_at"


def test_parts_of_a_run_share_what_they_measured_of_rounding():
    one = {"texts": 2, "positions": 400, "excused": 1, "gaps": [0.25], "bound": 0.2}
    two = {"texts": 3, "positions": 60, "excused": 0, "gaps": [], "bound": 0.3}
    both = {"texts": 5, "positions": 460, "excused": 1, "gaps": [0.25], "bound": 0.3}
    assert summed([one, two]).as_dict() == both
    assert summed([one, two]).wrong() == []
    assert summed([one]).wrong() == [
        "a text left the one alone at a gap of 0.2500, rounding moves 0.2000"
    ]


def test_a_text_beyond_what_any_part_measured_is_in_the_record():
    found = {"wrong": ["a part's own"], "texts": Comparison(1, 400, (0.5,), 0.2).as_dict()}
    record = record_of(
        build_parser().parse_args([*ARGS, "--output", "-"]), {("auto", 32, GRID): found}, whole=True
    )
    assert record["switches"]["wrong"] == [
        "a part's own",
        "a text left the one alone at a gap of 0.5000, rounding moves 0.2000",
    ]


def test_a_pool_larger_than_the_plan_says_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(
        bench_memory_sweep.Sweep, "longest", lambda self, streams: 512 // streams, raising=True
    )
    argv = [*ARGS, *SIZE.split(), "--output", str(tmp_path / "x.json")]
    found = bench_memory_sweep.measure(
        bench_memory_sweep.build_parser().parse_args(argv), ("auto", 32, GRID)
    )
    assert "kv auto, chunk 32, 1 x 528 tokens: fits, the plan says it does not" in found["wrong"]


def test_the_cap_and_the_reserve_reach_the_engine():
    args = bench_memory_sweep.build_parser().parse_args(["--output", "x"])
    settings = settings_of_cell(args, "int8", 64)
    assert settings["memory_limit_mb"] == 4096
    assert settings["reserve_memory_mb"] == 384
    assert settings["kv"] == {"dtype": "int8", "prefix_cache": False}
    assert settings["max_num_seqs"] == settings["max_partial_prefills"] == 4


def test_spread_and_togetherness():
    assert spread([10.0, 10.0, 12.0]) == pytest.approx(0.2)
    first, second = Request(1, 4, 0.0, times=[1, 5]), Request(2, 4, 0.0, times=[5, 9])
    assert ran_together([first, second])
    second.times = [6, 9]
    assert not ran_together([first, second])


def text(*choices: tuple[int, float]) -> Request:
    """(token, gap to the second best) of every position."""
    logprobs = [TokenLogprobs(t, -0.1, ((t, -0.1), (99, -0.1 - gap))) for t, gap in choices]
    return Request(1, 4, 0.0, tokens=[t for t, _ in choices], logprobs=logprobs)


def test_equal_texts_measure_what_rounding_does():
    found = compare(Comparison(), text((5, 2.0), (6, 1.0)), text((5, 2.02), (6, 1.05)))
    assert (found.texts, found.positions, found.gaps) == (1, 2, ())
    assert found.bound == pytest.approx(0.05)
    assert found.wrong() == []


def test_a_first_difference_is_excused_within_the_bound_and_nothing_after_it_counts():
    many = compare(Comparison(), text(*[(5, 1.0)] * 200), text(*[(5, 1.05)] * 200))
    tie = compare(many, text((5, 1.0), (7, 0.01), (8, 1.0)), text((5, 1.0), (6, 0.03), (9, 1.0)))
    assert (tie.positions, tie.gaps) == (202, (pytest.approx(0.03),))
    assert tie.wrong() == []
    assert str(tie) == "1 of 2 texts equal those alone, 1 near ties in 202 positions"


def test_a_difference_beyond_rounding_and_too_many_ties_are_wrong():
    apart = compare(Comparison(), text((5, 1.0), (7, 1.0)), text((5, 1.0), (6, 0.5)))
    assert apart.wrong() == [
        "a text left the one alone at a gap of 0.5000, rounding moves 0.0010",
        "1 of 2 positions had to be excused",
    ]
