"""What the prefill bench asks and writes, with everything that needs a GPU replaced."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench_prefill_gemm as bench
from overlap import Overlap


class Backend:
    """One of ours, on a CPU: zeros of the right shape."""

    def __init__(self, name: str) -> None:
        self.name = name

    def refuse(self, key: object) -> str | None:
        return None

    def prepare_strips(self, strips: object, dtype: torch.dtype) -> object:
        width = strips.out_features  # type: ignore[attr-defined]
        return lambda x: torch.zeros(x.shape[0], width)


class Dense(Backend):
    """The one that the overlap leaves out."""

    name = "cuda.strip_cublas"

    def __init__(self) -> None:
        super().__init__(Dense.name)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes, a clock that says 10 us, an overlap that says 1 to 5 ms."""
    small = {"CUDA": torch.device("cpu"), "LAYERS": 2, "HEAD": (512, 256), "ROWS": (128, 256)}
    small |= {"LAYER": ((64, 256), (64, 256), (128, 256), (64, 512)), "CONTROL": (64, 256, 32)}
    doubles = {
        "compile_first": lambda bits: None,
        "compute_capability": lambda device: 90,
        "device_info": lambda device: SimpleNamespace(multiprocessors=132),
        "copies_for": lambda size: 2,
        "graph_times": lambda calls, count, warmup: [0.01 for call in calls if call() is not None],
        "GemmAmpere": lambda: Backend("cuda.gemm_ampere"),
        "GemmHopper": lambda: Backend("cuda.gemm_hopper"),
        "StripCublas": Dense,
        "StripFew": lambda strips: lambda x: None,
        "run_beside": lambda prefill, decode: (
            prefill(),
            decode(),
            Overlap([1.0], [2.0], [3.0], [4.0, 5.0]),
        )[2],
    }
    for name, value in {**small, **doubles}.items():
        monkeypatch.setattr(bench, name, value)


def test_every_case_is_measured_and_written(
    on_cpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dense, ours at both widths, the control row; then every share that the card has."""
    out = tmp_path / "prefill.json"
    flags = ["--shapes", "256x512", "--chunks", "16", "--shares", "132", "100", "200"]
    assert bench.main(["--output", str(out), *flags]) == 0
    rows = json.loads(out.read_text())["rows"]
    times = [row for row in rows if row["metric"] == "time"]
    # Two numbers of rows times (dense + two widths times three backends), and the control.
    assert len(times) == 2 * (1 + 2 * 3) + 1
    assert {row["median"] for row in times} == {10.0}
    beside = [row for row in rows if row["metric"] == "decode_step_beside_prefill"]
    shares = [(row["case"]["backend"], row["case"]["max_ctas"]) for row in beside]
    assert shares == [
        ("cuda.gemm_ampere", 132),
        ("cuda.gemm_ampere", 100),
        ("cuda.gemm_hopper", 132),
        ("cuda.gemm_hopper", 100),
    ]
    assert {(row["median"], row["max"]) for row in beside} == {(4.5, 5.0)}
    printed = capsys.readouterr().out
    assert "W4 256x512 M=128: cublas 10.0  gemm_ampere 10.0  gemm_hopper 10.0" in printed
    assert "cuda.gemm_hopper chunk 16, 100 multiprocessors" in printed
