"""The picture of an insertion: medians by mode and chunk, in the result's order."""

from __future__ import annotations

import json

import plot_insertion
from bench_tpot_jitter import METRICS
from results import make_row


def record():
    rows = []
    for mode, chunk, base in (("serial", 512, 4.0), ("serial", 128, 2.0), ("mixed", 128, 1.0)):
        case = {"mode": mode, "chunk_tokens": chunk}
        for metric, unit in METRICS.items():
            rows.append(make_row(case, metric, unit, [base / 1e3, base / 1e3, 9.0], 1))
        rows.append(make_row(case, "prefill_steps_total", "steps", [3], 1))
    return {"rows": rows}


def test_medians_by_mode_and_chunk_in_ms():
    found = plot_insertion.cells(record())
    assert list(found) == ["serial", "mixed"]
    assert found["serial"][512]["max_itl_s"] == 4.0
    assert found["mixed"][128]["ttft_s"] == 1.0
    assert "prefill_steps_total" not in found["mixed"][128]
    assert "tokens_per_second" not in found["mixed"][128]


def test_a_picture_and_a_table_are_made(tmp_path, capsys):
    source, out = tmp_path / "r.json", tmp_path / "r.svg"
    source.write_text(json.dumps(record()))
    assert plot_insertion.main([str(source), "--output", str(out)]) == 0
    assert out.read_text().startswith("<?xml")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| serial | 128 | 2.00 |")
    assert len(lines) == 5
