"""The picture of a sweep: medians by engine, streams and context; the steady run is not in it."""

from __future__ import annotations

import json

import plot_memory_sweep
from results import make_row


def record():
    rows = []
    for kv, streams, context, rate in (
        ("auto", 1, 512, 300.0),
        ("auto", 1, 4096, 200.0),
        ("int8", 4, 512, 900.0),
    ):
        case = {"kv": kv, "chunk": 128, "streams": streams, "context": context}
        rows.append(make_row(case, "tokens_per_second", "tokens/s", [rate, rate, 1.0], 1))
        rows.append(make_row(case, "tpot_p95_s", "s", [1 / rate, 1 / rate, 9.0], 1))
    steady = {"kv": "int8", "chunk": 128, "streams": 4, "context": 512, "steady": True}
    rows.append(make_row(steady, "tokens_per_second", "tokens/s", [5.0], 1))
    return {"rows": rows}


def test_medians_by_engine_streams_and_context():
    found = plot_memory_sweep.lines_of(record())
    assert list(found) == ["KV auto, chunk 128", "KV int8, chunk 128"]
    assert sorted(found["KV auto, chunk 128"][1]) == [512, 4096]
    assert found["KV auto, chunk 128"][1][4096] == {"tokens_per_second": 200.0, "tpot_p95_s": 5.0}
    assert found["KV int8, chunk 128"][4][512]["tokens_per_second"] == 900.0


def test_a_picture_and_a_table_are_made(tmp_path, capsys):
    source, out = tmp_path / "r.json", tmp_path / "r.svg"
    source.write_text(json.dumps(record()))
    assert plot_memory_sweep.main([str(source), "--output", str(out)]) == 0
    assert out.read_text().startswith("<?xml")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| KV auto, chunk 128 | 1 | 512: 300 / 3.33, 4096: 200 / 5.00 |"
    assert len(lines) == 4
