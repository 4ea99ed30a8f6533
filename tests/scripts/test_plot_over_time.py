"""The picture of a long run: a soak's periods and a steady run's repetitions over the minutes."""

from __future__ import annotations

import json

import plot_over_time
from results import make_row


def soak():
    rows = [
        make_row({}, "tokens_per_second", "tokens/s", [10.0, 30.0, 20.0], 0),
        make_row({}, "device_memory", "MiB", [100.0, 101.0, 100.5], 0),
        make_row({}, "kv_pool", "MiB", [1.0, 2.0, 2.0], 0),
    ]
    return {"rows": rows, "switches": {"counts": {"seconds": 180.0}}}


def steady():
    case = {"kv": "auto", "steady": True}
    rows = [
        make_row({"kv": "auto"}, "tokens_per_second", "tokens/s", [1.0], 1),
        make_row(case, "tokens_per_second", "tokens/s", [5.0, 6.0], 1),
        make_row(case, "device_mib", "MiB", [7.0, 7.0], 1),
        make_row(case, "ended_at", "s", [30.0, 90.0], 1),
    ]
    return {"rows": rows, "switches": {}}


def test_a_soaks_periods_are_of_equal_length():
    minutes, found = plot_over_time.series_of(soak())
    assert minutes == [1.0, 2.0, 3.0]
    assert list(found) == ["tokens_per_second", "device_memory", "kv_pool"]


def test_a_steady_run_says_when_each_repetition_ended():
    minutes, found = plot_over_time.series_of(steady())
    assert minutes == [0.5, 1.5]
    assert found == {"tokens_per_second": [5.0, 6.0], "device_mib": [7.0, 7.0]}


def test_a_picture_and_its_lines_are_made(tmp_path, capsys):
    for name, record in (("soak", soak()), ("steady", steady())):
        source, out = tmp_path / f"{name}.json", tmp_path / f"{name}.svg"
        source.write_text(json.dumps(record))
        assert plot_over_time.main([str(source), "--output", str(out)]) == 0
        assert out.read_text().startswith("<?xml")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tokens_per_second: first 10, median 20, last 20, 3 values"
    assert len(lines) == 5
