"""The quality bench on a tiny model: every case once, a record that validates, a picture of it."""

from __future__ import annotations

import json

import pytest
import torch

import bench_quality
import dither_checkpoint
import plot_quality
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import write_tiny
from engine_actor.ops import dequantise
from results import validate


@pytest.mark.parametrize("text", ["w4", "w4:x", "w4:64:best", "auto"])
def test_what_is_no_case_is_refused(text):
    with pytest.raises(ValueError, match="is not RECIPE:GROUP"):
        bench_quality.Case.parse(text)


def test_every_case_is_measured_once_and_ends_in_the_record(tmp_path):
    model = write_tiny(tmp_path / "model", hidden_size=64, head_std=0.05)
    (tmp_path / "text.txt").write_text("A text of words, and of more words. " * 120)
    (tmp_path / "other.json").write_text(
        json.dumps({"res": [{"name": "W4 g64", "bpw": 4.25, "ppl": 22.4, "kl": 0.09}]})
    )
    output = tmp_path / "quality.json"
    text, work = str(tmp_path / "text.txt"), str(tmp_path / "work")
    words = ["--model", str(model), "--calibration", text, "--text", text, "--text", text]
    words += ["--rows", "1", "--work", work, "--output", str(output)]
    words += ["--quoted", str(tmp_path / "other.json"), "w3:32", "w3:32:rtn", "auto=w3:32"]
    assert bench_quality.main(words) == 0
    record = json.loads(output.read_text())
    validate(record)
    kl = {r["case"]["case"]: r["median"] for r in record["rows"] if r["metric"] == "kl"}
    assert kl["W4 g64"] == 0.09
    assert set(kl) == {"W4 g64", "w3:32", "w3:32:rtn", "auto=w3:32"}
    assert kl["w3:32"] < kl["w3:32:rtn"]
    bits = {
        r["case"]["case"]: r["median"] for r in record["rows"] if r["metric"] == "bits_per_weight"
    }
    assert bits["auto=w3:32"] <= bits["w3:32"]
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("*/config.json")}
    assert bench_quality.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    plot_quality.plot([record, record], tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_that_came_from_elsewhere_is_measured_as_it_is(tmp_path):
    model = write_tiny(tmp_path / "model", hidden_size=64)
    (tmp_path / "text.txt").write_text("A text of words, and of more words. " * 120)
    output, text = tmp_path / "quality.json", str(tmp_path / "text.txt")
    words = ["--model", str(model), "--calibration", text, "--text", text, "--rows", "1"]
    words += ["--work", str(tmp_path / "work"), "--output", str(output)]
    assert bench_quality.main([*words, "--other", f"itself={model}"]) == 0
    record = json.loads(output.read_text())
    validate(record)
    found = {row["metric"]: row["median"] for row in record["rows"]}
    assert found["kl"] == pytest.approx(0.0, abs=1e-6)
    assert found["top1"] == 1.0
    weights = dict(open_checkpoint(model).weights())
    size = weights["layers.0.down"].weight.element_size()
    assert found["bits_per_weight"] == 8 * size
    with pytest.raises(SystemExit):
        bench_quality.main([*words, "--other", "itself"])


def test_a_tuned_case_is_two_lines_before_and_after(tmp_path):
    model = write_tiny(tmp_path / "model", head_std=0.3)
    (tmp_path / "text.txt").write_text("A text of words, and of more words. " * 200)
    output, text = tmp_path / "quality.json", str(tmp_path / "text.txt")
    words = ["--model", str(model), "--calibration", text, "--text", text, "--rows", "1"]
    words += ["--work", str(tmp_path / "work"), "--output", str(output), "--tune-batch", "2"]
    words += ["--calibration-rows", "1", "--tune-rows", "3", "--tune-steps", "4"]
    assert bench_quality.main([*words, "w3:32:scales", "w3:32"]) == 0
    record = json.loads(output.read_text())
    validate(record)
    found = [
        (r["case"]["case"], r["case"]["method"], r["median"])
        for r in record["rows"]
        if r["metric"] == "kl"
    ]
    assert [row[:2] for row in found] == [
        ("w3:32", "ours"),
        ("w3:32:scales", "scales"),
        ("w3:32", "ours"),
    ]
    assert found[0][2] == found[2][2] > found[1][2]


def test_dither_stays_within_half_a_step_and_leaves_the_tables(tmp_path):
    source = write_tiny(tmp_path / "source", packed=True, bits=4, group=32, kind="offsets")
    assert dither_checkpoint.main([str(source), str(tmp_path / "out")]) == 0
    before = dict(open_checkpoint(source).weights())
    after = dict(open_checkpoint(tmp_path / "out").weights())
    assert set(before) == set(after)
    for name, packed in before.items():
        if not name.startswith("layers.") or name.endswith("norm"):
            continue
        step = packed.scales.float().abs().repeat_interleave(32, 1)[:, : packed.in_features]
        miss = (after[name].weight - dequantise(packed)).abs() / step
        assert 0.49 < float(miss.max()) <= 0.501
        assert 0.2 < float(miss.mean()) < 0.3
    assert torch.equal(after["embed"].qweight, before["embed"].qweight)
