"""The insertion bench on a tiny random model on the CPU: every case, every field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_insertion
from bench_insertion import Case, case_of
from results import validate


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("mixed:256", Case("mixed", 256)),
        ("green:2048:100", Case("green", 2048, 100)),
        ("serial:2048::256", Case("serial", 2048, None, 256)),
    ],
)
def test_a_case_is_a_mode_a_chunk_a_limit_and_a_slice(text: str, case: Case) -> None:
    assert case_of(text) == case


def test_each_way_that_the_machine_has_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "insertion.json"
    flags = "--checkpoint random:tiny --device cpu --phrase-tokens 120 --max-cache 260 --streams 2 "
    flags += "--short-tokens 16 --lead-tokens 2 --chunks 32 --repeats 1 --warmup 0 --alone "
    flags += f"--also serial:64::16 --output {output}"
    assert bench_insertion.main(flags.split()) == 0
    record = json.loads(output.read_text())
    validate(record)
    cases = [tuple(row["case"].values()) for row in record["rows"] if row["metric"] == "ttft_s"]
    assert cases == [
        ("serial", 32, None, None),
        ("mixed", 32, None, None),
        ("serial", 64, None, 16),
    ]
    steps = {
        (row["case"]["mode"], row["case"]["slice_tokens"]): row["raw"]
        for row in record["rows"]
        if row["metric"] == "prefill_decode_overlap_steps"
    }
    assert steps["serial", None] == [4]
    # 64 and 56 rows by 2 layers: a quarter and less of two layers is one.
    assert steps["serial", 16] == [4]
    assert "two_streams: not on this card" in capsys.readouterr().err
