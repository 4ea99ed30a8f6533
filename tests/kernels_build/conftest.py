"""Compiled kernels of these tests stay in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.jit import source
from kernels.jit.cubin_cache import set_cubin_folder


@pytest.fixture
def cubins(tmp_path: Path) -> Iterator[Path]:
    """An empty cubin folder; the configured one is put back."""
    set_cubin_folder(tmp_path / "cubins")
    yield tmp_path / "cubins"
    set_cubin_folder(None)


@pytest.fixture(autouse=True)
def fresh_scans() -> None:
    """Forget which files include which: tests rewrite sources in place, a process never does."""
    source._closure.cache_clear()
    source._names.cache_clear()
