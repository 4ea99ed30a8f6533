"""The evidence behind the tuned tables without a GPU: its rows, and the refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bench_tuned_linear as bench
from kernels.linear.tune import Shape


def test_a_row_for_each_backend_and_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Milliseconds become microseconds; the portable line leaves Hopper's own kernel out."""
    times = {
        1: {"cuda.strip_gemv": 0.007},
        128: {"cuda.gemm_ampere": 0.04, "cuda.gemm_hopper": 0.02},
    }
    monkeypatch.setattr(bench, "ShapeTimer", lambda shape: None)
    monkeypatch.setattr(bench, "time_shape", lambda shape, timer, backends, sm: times)
    rows = bench.measure(Shape(2048, 2048, 4, 128), 90)
    found = [(row["case"]["rows"], row["case"]["backend"], row["median"]) for row in rows]
    assert found == [
        (1, "cuda.strip_gemv", pytest.approx(7.0)),
        (128, "cuda.gemm_ampere", pytest.approx(40.0)),
        (128, "cuda.gemm_hopper", pytest.approx(20.0)),
    ]
    ours, portable = capsys.readouterr().out.splitlines()
    assert "sm_90" in ours
    assert "cuda.gemm_hopper" in ours
    assert "portable" in portable
    assert "cuda.gemm_hopper" not in portable


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "x.json"
    monkeypatch.setattr("sys.argv", ["bench_tuned_linear.py", "--output", str(output)])
    assert bench.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not output.exists()
