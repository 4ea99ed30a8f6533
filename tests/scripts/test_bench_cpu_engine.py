"""The CPU bench: cases are interleaved, ratios are taken inside a repetition, rows are valid."""

from __future__ import annotations

import pytest

import bench_cpu_engine
from bench_cpu_engine import ratios, rows_of
from cpu_peers import Prompts
from results import make_record, validate

FOUND = {
    ("deepinfer-sm86", "decode", 1): [90.0, 45.0, 60.0],
    ("deepinfer-sm86", "decode", 4): [180.0, 135.0, 120.0],
    ("deepinfer-sm86", "decode", 16): [270.0, 90.0, 180.0],
    ("deepinfer-sm86", "prefill", 512): [600.0, 300.0, 400.0],
    ("transformers-bf16", "decode", 1): [20.0, 10.0, 15.0],
    ("transformers-fp32", "decode", 1): [30.0, 15.0, 20.0],
    ("llama.cpp", "decode", 1): [100.0, 50.0, 60.0],
    ("llama.cpp", "prefill", 512): [300.0, 100.0, 400.0],
}


class ScriptedPeer:
    """Answers its call's number, and keeps the order of calls in a list shared by all."""

    def __init__(self, name, streams, log):
        self.name, self.streams, self._log = name, streams, log

    def decode(self, streams, steps):
        self._log.append((self.name, "decode", streams, steps))
        return float(len(self._log))

    def prefill(self, tokens):
        self._log.append((self.name, "prefill", tokens))
        return float(len(self._log))

    def close(self):
        self._log.append((self.name, "close"))


def test_ratios_are_taken_inside_each_repetition():
    assert ratios(FOUND, 512) == {
        "decode, one stream, over llama.cpp": [0.9, 0.9, 1.0],
        "decode, one stream, over the better of transformers": [3.0, 3.0, 3.0],
        "prefill over llama.cpp": [2.0, 3.0, 1.0],
        "decode, 4 streams over one": [2.0, 3.0, 2.0],
        "decode, 16 streams over one": [3.0, 2.0, 3.0],
    }


def test_without_a_peer_its_ratios_are_left_out():
    ours = {case: values for case, values in FOUND.items() if case[0] == "deepinfer-sm86"}
    assert set(ratios(ours, 512)) == {"decode, 4 streams over one", "decode, 16 streams over one"}


def test_rows_are_a_valid_result():
    rows = rows_of(FOUND, 1, 512)
    validate(make_record("cpu_engine", {}, rows))
    assert rows[0]["case"] == {"engine": "deepinfer-sm86", "streams": 1}
    assert rows[0]["median"] == 60.0
    assert rows[-1]["unit"] == "x"


def test_repetitions_interleave_the_engines_and_the_warm_up_is_left_out():
    log = []
    peers = [ScriptedPeer("a", (1, 4), log), ScriptedPeer("b", (1,), log)]
    args = bench_cpu_engine.build_parser().parse_args(
        ["--output", "x", "--repeats", "2", "--warmup", "1", "--steps", "8", "--prompt", "32"]
    )
    found = bench_cpu_engine.measure(peers, args)
    once = [
        ("a", "decode", 1, 8),
        ("a", "decode", 4, 8),
        ("a", "prefill", 32),
        ("b", "decode", 1, 8),
        ("b", "prefill", 32),
    ]
    assert log == once * 3
    assert found["a", "decode", 1] == [6.0, 11.0]
    assert found["b", "prefill", 32] == [10.0, 15.0]


def test_peers_are_closed_even_if_one_fails(monkeypatch, tmp_path):
    log = []
    failing = ScriptedPeer("a", (1,), log)
    failing.prefill = lambda tokens: 1 / 0
    monkeypatch.setattr(bench_cpu_engine, "build_peers", lambda args, work: ([failing], {}))
    with pytest.raises(ZeroDivisionError):
        bench_cpu_engine.main(["--output", str(tmp_path / "out.json")])
    assert log[-1] == ("a", "close")


def test_prompts_are_the_same_in_every_run_and_never_twice():
    first, second = Prompts(1000), Prompts(1000)
    drawn = [first.next(16) for _ in range(20)]
    assert drawn == [second.next(16) for _ in range(20)]
    assert len(set(drawn)) == 20
    assert all(0 <= token < 1000 for prompt in drawn for token in prompt)


def test_a_ratio_below_the_promise_is_told_and_fails(capsys):
    assert bench_cpu_engine.report(rows_of(FOUND, 1, 512)) is False
    assert "BELOW" not in capsys.readouterr().out
    slow = FOUND | {("llama.cpp", "decode", 1): [200.0, 100.0, 200.0]}
    assert bench_cpu_engine.report(rows_of(slow, 1, 512)) is True
    assert "(BELOW at least 0.75)" in capsys.readouterr().out
