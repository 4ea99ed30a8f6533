"""The attention bench without a GPU: what a case reads, which cases there are, its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bench_attention as bench
from results import make_row


def test_what_a_case_must_read() -> None:
    """Keys and values of 2 heads of 128: two bytes each, or one and a scale of two a head."""
    fp16 = bench.Cell(heads=16, kv_heads=2, batch=4, context=500, kv="fp16")
    int8 = bench.Cell(heads=16, kv_heads=2, batch=4, context=500, kv="int8")
    assert (fp16.kv_bytes, int8.kv_bytes) == (2_048_000, 1_040_000)
    assert fp16.n_blocks == 128
    assert fp16.sets == 132  # 256 MiB of 2,048,000 bytes each


def test_caches_to_rotate_are_at_least_one_and_at_most_512() -> None:
    small = bench.Cell(heads=16, kv_heads=2, batch=1, context=16, kv="fp16")
    large = bench.Cell(heads=28, kv_heads=4, batch=64, context=32768, kv="fp16")
    assert (small.sets, large.sets) == (512, 1)


def test_every_case_is_asked_for_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The record holds the rows and the flags; the picture is drawn from it."""
    asked: list[bench.Cell] = []
    monkeypatch.setattr(bench, "measure", lambda cells, repeats: _rows(cells, repeats, asked))
    output, picture = tmp_path / "a.json", tmp_path / "a.svg"
    flags = ["--heads", "16/2", "--batches", "1", "4", "--contexts", "512", "--repeats", "2"]
    assert bench.main([*flags, "--output", str(output), "--plot", str(picture)]) == 0
    assert [(cell.heads, cell.kv_heads, cell.batch, cell.context, cell.kv) for cell in asked] == [
        (16, 2, 1, 512, "fp16"),
        (16, 2, 1, 512, "int8"),
        (16, 2, 4, 512, "fp16"),
        (16, 2, 4, 512, "int8"),
    ]
    record = json.loads(output.read_text(encoding="utf-8"))
    assert record["switches"]["batches"] == [1, 4]
    assert len(record["rows"]) == 7
    assert picture.stat().st_size > 0


def _rows(cells: list[bench.Cell], repeats: int, asked: list[bench.Cell]) -> list[dict[str, Any]]:
    asked.extend(cells)
    rows = [make_row({}, "read_ceiling", "bytes/us", [4e6] * repeats, 2)]
    for cell in cells:
        for way in ("decode_heads", "torch_sdpa") if cell.kv == "fp16" else ("decode_heads",):
            case = {
                "heads": cell.heads,
                "kv_heads": cell.kv_heads,
                "batch": cell.batch,
                "context": cell.context,
                "kv": cell.kv,
                "way": way,
            }
            rows.append(make_row(case, "read", "TB/s", [1.0] * repeats, 2))
    return rows
