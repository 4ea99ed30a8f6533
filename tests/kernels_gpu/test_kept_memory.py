"""What stays lies apart from what lives only while a model is loaded."""

from __future__ import annotations

import pytest
import torch

from kernels.pack.kept_memory import keep, loading_apart

pytestmark = pytest.mark.gpu


def test_what_was_beside_goes_back_whole() -> None:
    """Ten kept tensors among ten times as much that is dropped, and the values are right."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before, size = torch.cuda.memory_reserved(), 3 << 20
    with loading_apart(device):
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        found, beside = [], []
        for number in range(10):
            beside += [torch.full((size,), number, dtype=torch.uint8, device=device)]
            beside += [torch.empty(3 * size, dtype=torch.uint8, device=device) for _ in range(3)]
            found.append(keep(beside[-4].view(-1, 2).T))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert all(bool((each == number).all()) for number, each in enumerate(found))
    assert all(each.is_contiguous() for each in found)
    del beside
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # torch's pages are of 20 MiB at most.
    assert torch.cuda.memory_reserved() - before <= 10 * size + (20 << 20)
