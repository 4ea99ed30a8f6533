"""The watched conversion with a double of `quantize`: kills, the plan read, bytes compared."""

from __future__ import annotations

import json
import sys

import bench_conversion
from engine_actor.load.tiny import write_tiny
from results import validate

# A layer each tenth of a second, a journal as the real one's, a copy of the source at the end.
DOUBLE = """
import json, pathlib, shutil, sys, threading
source, target = map(pathlib.Path, sys.argv[1:3])
work = target.with_name(target.name + ".unfinished")
path = work / "journal.json"
work.mkdir(exist_ok="--resume" in sys.argv)
layers = json.loads(path.read_text())["layers"] if path.is_file() else []
print("  layers (w4, 4.250 bits a weight)     1,000.5 MiB")
print("  embedding and head                      20.0 MiB")
print("  norms and biases                         0.5 MiB")
print("  KV cache, at least (4096 tokens)       100.0 MiB", flush=True)
while len(layers) < 8:
    layers.append({})
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"layers": layers}))
    partial.replace(path)
    threading.Event().wait(0.1)
shutil.copytree(source, target)
if "--spoil" in sys.argv and "--resume" in sys.argv:
    (target / "config.json").write_text((target / "config.json").read_text() + " ")
"""


def _run(tmp_path, monkeypatch, *flags):
    script = tmp_path / "double.py"
    script.write_text(DOUBLE)
    monkeypatch.setattr(bench_conversion, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(bench_conversion, "POLL_S", 0.01)
    source = write_tiny(tmp_path / "source")
    words = [str(source), "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out.json")]
    words += ["--kills", "1", "--earliest", "0.1", "--latest", "0.4", "--", *flags]
    return bench_conversion.main(words), json.loads((tmp_path / "out.json").read_text())


def test_both_runs_end_in_the_record_with_what_was_planned_and_stored(tmp_path, monkeypatch):
    code, record = _run(tmp_path, monkeypatch, "--recipe", "w4")
    assert code == 0
    validate(record)
    assert record["switches"]["flags"] == "--recipe w4"
    found = {(row["case"]["run"], row["metric"]): row for row in record["rows"]}
    assert found["left alone", "planned_weights"]["median"] == 1021.0
    assert 0 < found["left alone", "stored_weights"]["median"] < 1
    assert found["left alone", "host_peak"]["median"] > 1
    assert found["left alone", "layer"]["n"] == 7
    assert 1 <= found["killed and resumed", "layers_at_kill"]["median"] < 8
    equal = found["killed and resumed", "equal_files"]["median"]
    assert equal == found["killed and resumed", "files"]["median"] > 3


def test_other_bytes_after_a_kill_are_a_failure(tmp_path, monkeypatch):
    code, record = _run(tmp_path, monkeypatch, "--spoil")
    assert code == 1
    found = {row["metric"]: row["median"] for row in record["rows"]}
    assert found["equal_files"] == found["files"] - 1
