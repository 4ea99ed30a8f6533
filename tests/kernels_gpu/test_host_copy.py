"""Blocks of a KV cache to page-locked memory and back on a GPU, against torch's copies."""

from __future__ import annotations

import ctypes
import random
import threading
from itertools import accumulate

import pytest
import torch

from kernels.jit.driver import driver
from kernels.jit.host_memory import PinnedBytes
from kernels.kv.fetch import MOST_FETCHED, Fetch
from kernels.kv.host_copy import copy_blocks, copy_blocks_plainly

pytestmark = pytest.mark.gpu

BLOCKS, SLOTS = 40, 30
KINDS = {
    "one_layer": [256],
    "layers": [16384] * 5,
    "int8_with_scales": [8192] * 5 + [128] * 5,
    "odd_sizes": [48, 4096 + 16, 16, 32768],
}


def arrays_of(block_bytes: list[int], seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (BLOCKS, each), generator=draw, dtype=torch.uint8).cuda()
        for each in block_bytes
    ]


@pytest.mark.parametrize("thread_blocks", [1, 7, 64])
@pytest.mark.parametrize("count", [1, 3, SLOTS])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_both_ways_as_torch_does(kind: str, count: int, thread_blocks: int) -> None:
    block_bytes = KINDS[kind]
    offsets = [0, *accumulate(block_bytes)]
    draw = random.Random(count)
    moves = list(
        zip(draw.sample(range(BLOCKS), count), draw.sample(range(SLOTS), count), strict=True)
    )
    there = torch.tensor(moves, dtype=torch.int32).pin_memory()
    places = torch.tensor(offsets).pin_memory()
    memory = PinnedBytes(SLOTS * offsets[-1], torch.cuda.current_device())
    host = memory.tensor.view(SLOTS, offsets[-1])
    for to_host in (True, False):
        host.fill_(9)
        mine, theirs = arrays_of(block_bytes, 1), arrays_of(block_bytes, 1)
        wanted = torch.full_like(host, 9)
        if not to_host:
            host.random_(0, 256)
            wanted.copy_(host)
        addresses = torch.tensor([array.data_ptr() for array in mine]).pin_memory()
        copy_blocks(there, addresses, places, host, to_host, thread_blocks)
        copy_blocks_plainly(moves, theirs, wanted, to_host)
        torch.cuda.synchronize()
        assert torch.equal(host, wanted)
        for made, right in zip(mine, theirs, strict=True):
            assert torch.equal(made, right)


def test_memory_is_locked_to_the_byte_and_given_back() -> None:
    memory = PinnedBytes(3 * 2**20 + 16, torch.cuda.current_device())
    assert memory.tensor.shape == (3 * 2**20 + 16,)
    memory.tensor.fill_(7)
    on_device = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    on_device.copy_(memory.tensor[: 2**20], non_blocking=True)
    assert int(on_device.sum()) == 7 * 2**20
    memory.close()
    memory.close()


def test_a_thread_without_a_context_gives_it_back() -> None:
    memory = PinnedBytes(2**20, torch.cuda.current_device())
    address = memory.tensor.data_ptr()

    def is_locked() -> bool:
        flags = ctypes.c_uint()
        status = driver().cuMemHostGetFlags(ctypes.byref(flags), ctypes.c_void_p(address))
        return status == 0

    assert is_locked()
    other = threading.Thread(target=memory.close)
    other.start()
    other.join()
    assert not is_locked()


@pytest.mark.parametrize("count", [1, 16, 37, 5000, MOST_FETCHED + 1])
def test_few_bytes_are_fetched(count: int) -> None:
    host = torch.randint(0, 256, (2 * MOST_FETCHED,), dtype=torch.uint8).pin_memory()
    got = Fetch(torch.device("cuda"))(host[:count])
    assert (got.device.type, got.shape, got.dtype) == ("cuda", (count,), torch.uint8)
    assert torch.equal(got.cpu(), host[:count])
