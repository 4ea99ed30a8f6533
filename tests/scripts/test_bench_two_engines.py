"""The bench of several engines: what it holds against what it saw, and which processes it means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import bench_two_engines
from bench_two_engines import Bench, build_parser, measure, until
from engine_runs import BenchError
from results import make_record, validate
from sse_client import StreamRecord

ARGS = build_parser().parse_args(
    "--output x --streams 4 --repeats 2 --kill-after 0 --wait 1 --url http://127.0.0.1:1".split()
)
GPUS = {11: "GPU-a", 12: "GPU-b"}


class TwoEngines:
    """Takes turns; the one of the killed process is away until `start_again`."""

    def __init__(self, gpus: dict[int, str], texts: tuple[str, str] = ("a", "a")) -> None:
        self.gpus, self.texts = dict(gpus), texts
        self.names = {11: "engine-0", 12: "engine-1"}
        self.received = {"engine-0": 0, "engine-1": 0}
        self.open = {"engine-0": 2, "engine-1": 2}

    def count(self, metric: str) -> dict[str, int]:
        living = {self.names[pid] for pid in self.gpus}
        return {name: n for name, n in self.received.items() if name in living}

    def running(self) -> dict[str, int]:
        return {self.names[pid]: self.open[self.names[pid]] for pid in self.gpus}

    def pids(self) -> set[int]:
        return set(self.gpus)

    def cards(self, count: int) -> dict[str, str]:
        return {self.names[pid]: uuid for pid, uuid in self.gpus.items()}

    def complete(self, body: dict[str, Any]) -> str:
        turn = sum(self.received.values()) % 2
        self.received[f"engine-{turn}"] += 1
        return self.texts[turn]

    def kill(self, pid: int, which: int) -> None:
        self.dead = self.gpus.pop(pid)

    def start_again(self) -> None:
        self.gpus[13], self.names[13] = self.dead, "engine-1"


def stream(error: str | None = None, finish: str | None = "length") -> StreamRecord:
    times = [1.0, 2.0, 3.0, 4.0]
    return StreamRecord(0.0, times, 4, 4, None if error else finish, error)


class FourStreams:
    """Every load is whole, but the long one, which ends as `ends` says."""

    def __init__(self, ends: list[StreamRecord]) -> None:
        self.ends = ends

    def __call__(self, streams: int) -> list[StreamRecord]:
        return [stream()] * streams

    def begin(self, streams: int, out: int) -> Any:
        return lambda: self.ends if out == ARGS.long else [stream()] * streams

    def body(self) -> dict[str, Any]:
        return {"prompt": [1], "stream": True, "stream_options": {}}


HALF_TOLD = [stream(), stream(), stream("restarted"), stream("restarted")]


def wrong(
    monkeypatch: pytest.MonkeyPatch, engines: TwoEngines, ends: list[StreamRecord]
) -> list[str]:
    bench = Bench(engines, FourStreams(ends), ARGS)
    monkeypatch.setattr(bench_two_engines.os, "kill", engines.kill)
    monkeypatch.setattr(bench_two_engines.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(bench_two_engines, "fetch_json", lambda url: {"status": "ready"})
    back = bench.back
    bench.back = lambda *given: (engines.start_again(), back(*given))
    bench.run(2)
    validate(make_record("two_engines", bench.facts, bench.rows))
    assert bench.facts["answered before"] == {"engine-0": 1, "engine-1": 1}
    assert bench.facts["death"]["gone"] == ["engine-1"]
    return bench.wrong


def test_a_death_that_cost_half_of_the_streams(monkeypatch):
    assert wrong(monkeypatch, TwoEngines(GPUS), HALF_TOLD) == []


def test_engines_that_share_a_gpu(monkeypatch):
    found = wrong(monkeypatch, TwoEngines({11: "GPU-a", 12: "GPU-a"}), HALF_TOLD)
    assert [line.split(": ")[:2] for line in found] == [
        ["before", "engines share a GPU"],
        ["after", "engines share a GPU"],
    ]


def test_engines_of_a_cpu_have_no_cards(monkeypatch):
    assert wrong(monkeypatch, TwoEngines({11: "", 12: ""}), HALF_TOLD) == []


def test_engines_that_do_not_say_the_same(monkeypatch):
    found = wrong(monkeypatch, TwoEngines(GPUS, ("a", "b")), HALF_TOLD)
    assert found == ["before: 2 texts of one prompt", "after: 2 texts of one prompt"]


@pytest.mark.parametrize(
    ("ends", "line"),
    [
        ([stream(), stream(), stream(finish=None), stream("restarted")], "4 streams, other ends"),
        ([stream()] * 4, "0 told of an error, 2 were lost"),
        ([stream(), *[stream("restarted")] * 3], "3 told of an error, 2 were lost"),
    ],
    ids=["no end", "nobody told", "more than were there"],
)
def test_streams_that_ended_otherwise(monkeypatch, ends, line):
    found = wrong(monkeypatch, TwoEngines(GPUS), ends)
    assert len(found) == 1
    assert found[0].startswith(line)


def test_one_that_stays_away(monkeypatch):
    bench = Bench(TwoEngines(GPUS), FourStreams(HALF_TOLD), ARGS)
    monkeypatch.setattr(bench_two_engines, "until", lambda ask, seconds: 1.0 if ask() else None)
    bench.back(3, {11, 12})
    assert bench.wrong == ["not back within 1 s"]


@pytest.mark.parametrize(
    ("count", "line"), [(1, "one engine"), (3, "not all of 3 engines answer within 1 s")]
)
def test_nobody_is_killed_where_not_several_are_ready(monkeypatch, count, line):
    status = {"config": {"num_engines": count}, "model": {"name": "m", "vocab_size": 9}}
    monkeypatch.setattr(bench_two_engines, "wait_for_server", lambda args: status)
    monkeypatch.setattr(bench_two_engines, "Engines", lambda url: TwoEngines(GPUS))
    monkeypatch.setattr(bench_two_engines, "until", lambda ask, seconds: 1.0 if ask() else None)
    monkeypatch.setattr(Bench, "run", lambda self, count: pytest.fail("it ran"))
    with pytest.raises(BenchError, match=line):
        measure(ARGS, FourStreams([]))


def test_streams_that_never_all_ran(monkeypatch):
    engines = TwoEngines(GPUS)
    engines.open = {"engine-0": 2, "engine-1": 1}
    monkeypatch.setattr(bench_two_engines, "until", lambda ask, seconds: 1.0 if ask() else None)
    found = wrong(monkeypatch, engines, HALF_TOLD)
    assert found[0] == "4 streams never ran all at once"


def test_until_asks_again_where_nothing_answers():
    answers = iter([OSError("no"), False, True])

    def ask() -> bool:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert until(ask, 5) is not None
    assert until(lambda: False, 0) is None


def test_cards_by_asking_whoever_answers(monkeypatch):
    turns = iter(["engine-0", None, "engine-0", "engine-1", "engine-0"])

    def ask(url: str) -> Any:
        name = next(turns)
        return name and {"engine": name, "model": {"card_uuid": f"GPU-{name[-1]}"}}

    monkeypatch.setattr(bench_two_engines, "fetch_json", ask)
    monkeypatch.setattr(bench_two_engines, "listener", lambda port: SimpleNamespace(pid=1))
    monkeypatch.setattr(bench_two_engines, "session_leader", lambda pid: SimpleNamespace(pid=1))
    engines = bench_two_engines.Engines("http://127.0.0.1:1")
    assert engines.cards(2) == {"engine-0": "GPU-0", "engine-1": "GPU-1"}
    assert next(turns) == "engine-0"


def test_only_the_session_that_listens_is_looked_at(monkeypatch):
    members = [
        SimpleNamespace(pid=5, command="ray::EngineActor"),
        SimpleNamespace(pid=6, command="x"),
    ]
    monkeypatch.setattr(bench_two_engines, "listener", lambda port: SimpleNamespace(pid=port))
    monkeypatch.setattr(bench_two_engines, "session_leader", lambda pid: SimpleNamespace(pid=pid))
    asked = []
    monkeypatch.setattr(
        bench_two_engines, "session_members", lambda leader: asked.append(leader) or members
    )
    assert bench_two_engines.Engines("http://127.0.0.1:8010").pids() == {5}
    assert asked == [8010]
