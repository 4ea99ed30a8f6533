"""Memory under fixed addresses on a real card: torch's view of it, graphs over it, its end."""

from __future__ import annotations

import pytest
import torch

from kernels.jit.driver import LaunchError
from kernels.jit.mapped_memory import CudaMemory, why_no_virtual_memory
from kernels.jit.nvrtc import nvrtc
from kernels.jit.virtual_memory import VirtualPool

pytestmark = pytest.mark.gpu

HALF = torch.float16
ROW = 4096
"""Bytes of a block: two thousand halves."""


@pytest.fixture
def memory() -> CudaMemory:
    torch.empty(1, device="cuda")
    assert why_no_virtual_memory(0) is None
    return CudaMemory(torch.cuda.current_device())


def test_arrays_stay_in_place_and_keep_what_they_hold(memory: CudaMemory) -> None:
    pool = VirtualPool([ROW, ROW // 8], 10_000, memory)
    pool.resize(100)
    first = pool.tensor(0).view(HALF)
    assert (first.device.type, first.data_ptr()) == ("cuda", pool.address(0))
    first.fill_(3)
    pool.tensor(1).fill_(5)
    pool.resize(9_000)
    grown = pool.tensor(0).view(HALF)
    assert grown.data_ptr() == first.data_ptr()
    assert bool((grown[: first.numel()] == 3).all())
    grown[-ROW:] = 7
    pool.resize(50)
    pool.resize(10_000)
    assert bool((pool.tensor(0).view(HALF)[: 50 * ROW // 2] == 3).all())
    assert bool((pool.tensor(1)[: 50 * ROW // 8] == 5).all())


def test_what_is_unmapped_or_closed_is_the_cards_again(memory: CudaMemory) -> None:
    """More than the card has, an eighth at a time. Others may run on it: nothing else is asked."""
    block = torch.cuda.get_device_properties(0).total_memory >> 10
    for _ in range(6):
        pool = VirtualPool([block], 128, memory)
        pool.resize(128)
        pool.resize(1)
        pool.resize(128)
        assert pool.mapped_bytes >= 128 * block
        pool.close()
        assert pool.mapped_bytes == 0


def test_a_graph_goes_on_after_growth_and_after_a_shrink(memory: CudaMemory) -> None:
    pool = VirtualPool([ROW], 50_000, memory)
    pool.resize(600)
    low = pool.tensor(0).view(HALF)[: 100 * ROW // 2]
    low.zero_()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        low.add_(1)
    for n_blocks in (600, 50_000, 100, 3_000):
        pool.resize(n_blocks)
        graph.replay()
    assert bool((pool.tensor(0).view(HALF)[: 100 * ROW // 2] == 4).all())


def test_what_no_card_has_is_torchs_own_error(memory: CudaMemory) -> None:
    size = 1 << 44
    address = memory.reserve(size)
    with pytest.raises(torch.OutOfMemoryError, match="no 17592186044416 bytes for the KV pool"):
        memory.map(address, size)
    memory.free(address, size)
    torch.ones(4, device="cuda").sum().item()


def test_a_mistake_of_ours_is_a_launch_error_with_the_drivers_number(memory: CudaMemory) -> None:
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE") as caught:
        memory.unmap(4096, memory.granularity)
    assert (caught.value.status, caught.value.is_out_of_memory) == (1, False)


def state_of_block(address: int) -> str | None:
    """What torch's allocator says of the block at an address; None: the address is not torch's."""
    for segment in torch.cuda.memory_snapshot():
        place = segment["address"]
        for block in segment["blocks"]:
            if place <= address < place + block["size"]:
                return str(block["state"])
            place += block["size"]
    return None


def test_cupy_takes_its_memory_from_torch() -> None:
    """By the block's own state: a sum of bytes would see what others of the process do."""
    cupy = pytest.importorskip("cupy")
    nvrtc()
    array = cupy.zeros(8 << 20, dtype="u1")
    address = int(array.data.ptr)
    assert state_of_block(address) == "active_allocated"
    del array
    assert state_of_block(address) != "active_allocated"
