"""`deepinfer-sm86 tune`: the shapes of a checkpoint, and what is said where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_actor import ops, tuning
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import write_tiny
from kernels.spec.tuned import TunedRow
from serve_app.cli import main


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny packed checkpoint; the cache is tmp_path's."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    write_tiny(tmp_path / "tiny", packed=True)
    return tmp_path / "tiny"


def test_without_a_gpu_it_says_so(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, nothing written."""
    monkeypatch.setattr(tuning, "can_tune", lambda: False)
    assert main(["tune", "--model", str(packed)]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: tune measures on a CUDA device, torch finds none here\n"
    assert shown.out == ""


def test_the_shapes_are_the_fused_linears(packed: Path) -> None:
    """q, k and v as one, gate and up as one; each size once."""
    checkpoint = open_checkpoint(packed)
    model = checkpoint.config
    shapes = list(tuning.shapes_of(checkpoint))
    assert {shape.bits for shape in shapes} <= {3, 4}
    sizes = [(shape.n, shape.k) for shape in shapes]
    assert (2 * model.intermediate, model.hidden) in sizes
    assert (model.hidden, model.intermediate) in sizes
    assert len(set(shapes)) == len(shapes)


def test_what_was_found_is_printed(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line a row, and where the table is."""

    def measured(shapes: list[ops.LinearShape], progress: object) -> tuple[Path, list[TunedRow]]:
        row = TunedRow("linear", "cuda.x", "here", (4,), (1, 8), (64, 64), (32, 32))
        return Path("table.yaml"), [row]

    monkeypatch.setattr(tuning, "can_tune", lambda: True)
    monkeypatch.setattr(ops, "tune_this_card", measured)
    assert main(["tune", "--model", str(packed)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "64x32 W4, 1 to 8 rows: cuda.x",
        "written to table.yaml; used from the next start on",
    ]
