"""The bench of the host tier on a tiny random model on the CPU: every visit, every field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_host_tier
from results import validate


def test_a_prefix_comes_back_with_the_tier_and_not_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tier.json"
    flags = "--checkpoint random:tiny --device cpu --prefix 1024 --tail 4 --streams 0 1 "
    flags += "--stream-prompt 8 --stream-tokens 100 --budget-mb 1 --host-budget-mb 4 "
    flags += f"--max-cache 1100 --repeats 1 --warmup 0 --output {output}"
    assert bench_host_tier.main(flags.split()) == 0
    record = json.loads(output.read_text())
    validate(record)
    cached = {
        (row["case"]["visit"], row["case"]["streams"], row["case"]["tier"]): row["raw"][0]
        for row in record["rows"]
        if row["metric"] == "cached_tokens"
    }
    for streams in (0, 1):
        for tier in ("off", "on"):
            assert cached["first", streams, tier] == 0
            assert cached["cached", streams, tier] == 1024
        assert cached["evicted", streams, "off"] < 1024
        assert cached["evicted", streams, "on"] == 1024
    gaps = [row for row in record["rows"] if row["metric"] == "longest_gap"]
    assert {row["case"]["streams"] for row in gaps} == {1}
    assert "evicted" in capsys.readouterr().out
