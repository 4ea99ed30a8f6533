"""What the pictures of the prefill bench are drawn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plot_prefill_gemm import main, shares, times


def row(metric: str, median: float, **case: Any) -> dict[str, Any]:
    """As far as the plots read it."""
    return {"metric": metric, "median": median, "case": case}


@pytest.fixture
def record() -> dict[str, Any]:
    """One shape with two contenders, a control shape with one, one chunk at two shares."""
    metrics = ("decode_step_alone", "decode_step_beside_prefill")
    metrics += ("prefill_alone", "prefill_beside_decode")
    shape = {"n": 2048, "k": 1024, "m": 512}
    return {
        "rows": [
            row("time", 10.0, bits=4, backend="cuda.gemm_hopper", **shape),
            row("time", 20.0, bits=16, backend="cublas", **shape),
            row("time", 5.0, bits=3, backend="cuda.gemm_hopper", **shape),
            row("time", 5.0, bits=16, backend="cublas", n=64, k=64, m=8),
            *(
                row(name, float(share), backend="cuda.gemm_hopper", bits=4, m=512, max_ctas=share)
                for share in (132, 84)
                for name in metrics
            ),
        ]
    }


def test_rates_are_of_the_bits_asked(record: dict[str, Any]) -> None:
    """2 x 512 x 2048 x 1024 products in 10 us; a control is no panel."""
    assert times(record, 4) == {
        (2048, 1024): {
            "cuda.gemm_hopper": [(512, pytest.approx(214.748, rel=1e-5))],
            "cublas": [(512, pytest.approx(107.374, rel=1e-5))],
        }
    }


def test_shares_rise(record: dict[str, Any]) -> None:
    found = shares(record)["cuda.gemm_hopper", 512]
    assert found["prefill_alone"] == [(84, 84.0), (132, 132.0)]
    assert len(found) == 4


def test_both_pictures_are_written(record: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "result.json"
    source.write_text(json.dumps(record), encoding="utf-8")
    pictures = tmp_path / "rates.svg", tmp_path / "shares.svg"
    words = [str(source), "--output", str(pictures[0]), "--overlap", str(pictures[1])]
    assert main(words) == 0
    assert all("</svg>" in path.read_text(encoding="utf-8") for path in pictures)
