"""A CPU's allocator needs no order of what stays and what does not."""

from __future__ import annotations

import torch

from kernels.pack.kept_memory import keep, kept, loading_apart


def test_on_a_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(6).view(2, 3).T
    with loading_apart(torch.device("cpu")):
        assert keep(tensor) is tensor
        with kept():
            assert torch.empty(3).device.type == "cpu"
    assert keep(tensor) is tensor
