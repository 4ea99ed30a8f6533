"""The seed's prefill bench without a GPU: its shapes and figures, its rows, its refusal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import bench_sm86_tiled_prefill as bench
from results import make_record, validate


def test_the_seeds_shapes_and_ratios() -> None:
    """Article section 2.7 and 3.2: 2.87, 2.26, 2.24; 9.45, 7.71; 0.48, 0.49, 0.53."""
    shapes = [(case.bits, case.n, case.k) for case in bench.CASES]
    assert shapes == [
        (4, 5632, 2048),
        (4, 2048, 5632),
        (4, 3584, 18944),
        (3, 37888, 3584),
        (3, 3584, 18944),
    ]
    ratios = [round(case.seed_fallback_ms / case.seed_tiled_ms, 2) for case in bench.CASES]
    assert ratios == [2.87, 2.26, 2.24, 9.45, 7.71]
    batches = {rows: round(a / b, 2) for rows, (a, b) in bench.SEED_BATCH_MS.items()}
    assert batches == {2: 0.48, 4: 0.49, 8: 0.53}


def test_the_seeds_flags() -> None:
    """--iterations and --output, 30 rows, three runs thrown away."""
    args = bench.build_parser().parse_args(["--iterations", "20", "--output", "x.json"])
    assert (args.iterations, args.output, args.rows) == (20, Path("x.json"), 30)
    assert (bench.WARMUP, bench.GROUP) == (3, 128)
    assert {bench.TILED, bench.FALLBACK, bench.OURS} <= set(bench.prompt_ways())
    stages = [name for name in bench.prompt_ways() if "cp_async" in name]
    assert len(stages) == 3


def test_rows_hold_times_and_ratios() -> None:
    """A ratio is taken run by run, slower over faster; the whole is a valid record."""
    times = {"fallback": [4.0, 9.0], "tiled": [2.0, 3.0]}
    rows = bench.rows_of(times, {"bits": 4}, {"tiled over fallback": ("fallback", "tiled")})
    assert [row["raw"] for row in rows] == [[4.0, 9.0], [2.0, 3.0], [2.0, 3.0]]
    assert (rows[2]["case"]["way"], rows[2]["unit"]) == ("tiled over fallback", "x")
    validate(make_record("bench", {}, rows))


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit code 2, nothing written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--output", str(output)])
    assert bench.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not output.exists()
