"""A split card: kernels loaded in the primary context run on their own multiprocessors only."""

from __future__ import annotations

import pytest
import torch

from kernels.jit.green_contexts import GreenContextRefused, split_card
from kernels.jit.kernel import CudaSource, Kernel

pytestmark = pytest.mark.gpu
BLOCKS = 2048
WHERE = """
extern "C" __global__ void where(int* out) {
    unsigned multiprocessor;
    asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor));
    const long long begin = clock64();
    while (clock64() - begin < 20000) {}
    if (threadIdx.x == 0) out[blockIdx.x] = multiprocessor;
}
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """Writes the multiprocessor that each block runs on; loaded before any split."""
    path = tmp_path_factory.mktemp("where") / "where.cu"
    path.write_text(WHERE, encoding="utf-8")
    kernel = CudaSource(str(path)).kernel("where")
    kernel.load()
    return kernel


def split(first: int) -> tuple[torch.cuda.ExternalStream, torch.cuda.ExternalStream, int, int]:
    try:
        few, many = split_card(0, first, (-1, 0))
    except GreenContextRefused as refusal:
        pytest.fail(f"this card should be split: {refusal}")
    streams = (torch.cuda.ExternalStream(part.stream) for part in (few, many))
    return (*streams, few.multiprocessors, many.multiprocessors)


def run(where: Kernel, stream: torch.cuda.ExternalStream) -> torch.Tensor:
    out = torch.full((BLOCKS,), -1, dtype=torch.int32, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        where.launch((BLOCKS, 1, 1), (1024, 1, 1), out)
    return out


def test_each_part_has_its_own_multiprocessors(where: Kernel) -> None:
    decode, prefill, few, many = split(32)
    total = torch.cuda.get_device_properties(0).multi_processor_count
    assert few >= 32
    assert few + many == total
    found = [run(where, stream) for stream in (decode, prefill)]
    torch.cuda.synchronize()
    places = [set(out.tolist()) for out in found]
    assert -1 not in places[0] | places[1]
    assert len(places[0]) == few
    assert len(places[1]) == many
    assert not places[0] & places[1]


def test_torch_works_on_a_part_and_frees_its_memory_to_it() -> None:
    decode, _, _, _ = split(16)
    a = torch.randn(512, 512, device="cuda", dtype=torch.float16)
    right = a @ a
    decode.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(decode):
        for _ in range(4):
            got = torch.nn.functional.silu(a @ a)
    torch.cuda.current_stream().wait_stream(decode)
    torch.testing.assert_close(got, torch.nn.functional.silu(right), rtol=2e-3, atol=2e-2)


def test_a_graph_captured_on_a_part_stays_on_it(where: Kernel) -> None:
    """Its stream is waited for, as the engine does. torch.cuda.synchronize() waits for what was
    launched on a part one by one, not for a graph (CUDA 13, driver 580)."""
    decode, _, few, _ = split(16)
    out = torch.full((BLOCKS,), -1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=decode):
        where.launch((BLOCKS, 1, 1), (1024, 1, 1), out)
    with torch.cuda.stream(decode):
        graph.replay()
    torch.cuda.current_stream().wait_stream(decode)
    places = set(out.tolist())
    assert -1 not in places
    assert len(places) == few
