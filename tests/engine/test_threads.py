"""The default number of torch threads: physical cores, one of them left to HTTP and Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_actor import threads


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (4, 3), (16, 15)])
def test_one_core_is_left_to_the_processes_around_the_engine(cores: int, expected: int) -> None:
    assert threads.engine_threads(cores) == expected


def test_two_threads_of_one_core_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_allowed_cpus", lambda: {0, 1, 2, 3})
    cpuinfo = tmp_path / "cpuinfo"
    blocks = [f"processor\t: {i}\nphysical id\t: 0\ncore id\t\t: {i // 2}\n" for i in range(4)]
    cpuinfo.write_text("\n".join(blocks))
    assert threads.physical_cores(cpuinfo) == 2


def test_a_virtual_machine_without_core_ids_counts_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_allowed_cpus", lambda: {0, 2})
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("\n".join(f"processor\t: {i}\n" for i in range(3)))
    assert threads.physical_cores(cpuinfo) == 2


def test_a_machine_that_says_nothing_has_half_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_allowed_cpus", lambda: set(range(8)))
    assert threads.physical_cores(tmp_path / "absent") == 4
