"""What runs under compute-sanitizer is right by itself, and no kernel is without a case."""

from __future__ import annotations

import pytest

from kernels.jit.source import KERNELS_FOLDER
from tests.kernels_gpu.small_set import CASES, run_all


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    CASES[name]()


def test_every_source_has_a_case() -> None:
    sources = {path.relative_to(KERNELS_FOLDER).as_posix() for path in KERNELS_FOLDER.rglob("*.cu")}
    assert {name.split()[0] for name in CASES} == sources


def test_what_fails_or_comes_too_late_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the others run all the same."""
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    ran: list[str] = []

    def fails() -> None:
        raise ValueError("a hazard")

    assert run_all({"one": fails, "two": lambda: ran.append("two")}, 60.0) == 1
    assert ran == ["two"]
    assert "1 of 2 cases ran and were right" in capsys.readouterr().out
    assert run_all({"one": fails}, -1.0) == 1
    assert "left out: one" in capsys.readouterr().out
