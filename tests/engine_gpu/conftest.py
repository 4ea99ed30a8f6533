"""Tiny checkpoints on a CUDA device, and the tokens that the CPU gives for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_actor.load.tiny import write_tiny
from tests.engine.real_engine import Loaded, load


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed W4, half-precision activations, a head whose best two logits lie far apart."""
    return write_tiny(tmp_path_factory.mktemp("gpu"), "llama", seed=5, packed=True)


@pytest.fixture(scope="session")
def on_gpu(tiny_folder: Path) -> Loaded:
    """The default numerics on the GPU."""
    return load(tiny_folder, "fast", "cuda")


@pytest.fixture(scope="session")
def on_cpu(tiny_folder: Path) -> Loaded:
    """Exact numerics on the CPU: the reference."""
    return load(tiny_folder, "exact")
