"""Tiny checkpoints on a CUDA device, and the tokens that the CPU gives for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_actor.load.tiny import write_tiny
from engine_actor.model.layer_ops import CUDA_ATTENTION
from tests.demo_fixture import demo_gguf
from tests.engine.real_engine import Loaded, load

__all__ = ["demo_gguf"]


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


@pytest.fixture(scope="session")
def half_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64 in half precision: what the kernels of a layer take."""
    shape: dict[str, Any] = {"head_dim": 64, "dtype": "float16", "hidden_size": 128}
    return write_tiny(tmp_path_factory.mktemp("half"), "llama", seed=3, packed=True, **shape)


@pytest.fixture(scope="session")
def on_kernels(half_folder: Path) -> Loaded:
    """A model whose every step runs the kernels of a layer, each launched by itself."""
    loaded = load(half_folder, "fast", "cuda")
    assert loaded.runner.op_set.attention is CUDA_ATTENTION
    loaded.runner.prepare_decode(16, 256, graphs=False)
    return loaded


@pytest.fixture(scope="session")
def on_graphs(half_folder: Path) -> Loaded:
    """The same with its decode steps replayed from graphs."""
    loaded = load(half_folder, "fast", "cuda")
    loaded.runner.prepare_decode(16, 256, graphs=True)
    return loaded
