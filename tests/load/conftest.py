"""Fixtures of the loading tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.demo_fixture import demo_folder, demo_gguf

__all__ = ["demo_folder", "demo_gguf"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine are many times slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
