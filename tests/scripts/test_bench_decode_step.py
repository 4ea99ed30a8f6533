"""The bench of one decode step without a GPU: what it asks of the model, and a kernel left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import bench_decode_step as bench
from engine_actor.model.runner import ModelRunner
from kernels.jit.kernel import Kernel


def test_sequences_of_one_length_with_blocks_of_their_own() -> None:
    """Two of 20 keys, the new one in slot 19 of its sequence; 40 tokens are 3 blocks each."""
    runner = cast(ModelRunner, SimpleNamespace(device=torch.device("cpu")))
    inputs = bench.batch(runner, 2, 20, 40)
    assert list(inputs.q_lens) == [1, 1]
    assert inputs.positions.tolist() == [19, 19]
    assert inputs.slots.tolist() == [19, 3 * bench.BLOCK + 19]


def test_one_kernel_is_left_out_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the step raises."""
    launched: list[str] = []

    def launch(kernel: Any, *args: object, **kwargs: object) -> None:
        launched.append(kernel.entry)

    monkeypatch.setattr(Kernel, "launch", launch)
    kernels = [SimpleNamespace(entry="norm"), SimpleNamespace(entry="draw")]

    def step() -> None:
        for kernel in kernels:
            Kernel.launch(cast(Kernel, kernel), (1, 1, 1), (1, 1, 1))

    def failing() -> None:
        with bench.left_out("norm"):
            step()
            raise ValueError("a step")

    with pytest.raises(ValueError, match="a step"):
        failing()
    step()
    assert launched == ["draw", "norm", "draw"]
