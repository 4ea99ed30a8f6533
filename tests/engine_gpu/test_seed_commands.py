"""The seed's scheduler benches (10.3 and 10.4) on a GPU: both works on two streams, and the switch
(S-70, S-71, S-72)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bench_paged_scheduler
import bench_tpot_jitter

pytestmark = pytest.mark.gpu

HERE = ["--checkpoint", "random:tiny", "--device", "cuda", "--set", "kv.budget_mb=64"]
PAGED = (
    "--backend w4a16 --max-new-tokens 16 --max-cache 128 --prefill-chunk-tokens 32 "
    "--concurrency 1,2,4 --reserve-memory-mb 384 --no-prefix-cache"
)
JITTER = "--backend w4a16 --max-cache 256 --max-new-tokens 12 --chunk-sizes 128 --long-repeat 8"


def run(bench: Any, line: str, switch: list[str], folder: Path) -> dict[str, Any]:
    out = folder / "out.json"
    assert bench.main([*HERE, *line.split(), *switch, "--output", str(out)]) == 0
    record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert record["prefill_decode_overlap"] is (not switch)
    return record


@pytest.mark.parametrize("switch", [[], ["--no-prefill-decode-overlap"]], ids=["overlap", "none"])
def test_requests_at_once(switch: list[str], tmp_path: Path) -> None:
    """Stream steps: none for one request, some for two and four, none with the overlap off."""
    runs = run(bench_paged_scheduler, PAGED, switch, tmp_path)["runs"]
    assert len(runs) == 3 * 5
    for each in runs:
        logical = {1: 0, 2: 1, 4: 3}[each["concurrency"]]
        assert each["prefill_decode_overlap_steps"] == logical
        assert each["prefill_decode_stream_overlap_steps"] == (0 if switch else logical)


@pytest.mark.parametrize("switch", [[], ["--no-prefill-decode-overlap"]], ids=["overlap", "none"])
def test_a_long_prompt_beside_a_stream(switch: list[str], tmp_path: Path) -> None:
    runs = run(bench_tpot_jitter, JITTER, switch, tmp_path)["runs"]
    assert len(runs) == 5
    for each in runs:
        assert each["mode"] == ("serial" if switch else "two_streams")
        assert each["prefill_decode_overlap_steps"] == 2
        assert each["prefill_decode_stream_overlap_steps"] == (0 if switch else 2)
