"""Launching by torch's rules: its current stream, its graphs, its memory."""

from __future__ import annotations

import threading

import pytest
import torch

from kernels.jit.driver import LaunchError
from kernels.jit.kernel import CudaSource, Kernel

pytestmark = pytest.mark.gpu
SOURCE = """\
extern "C" __global__ void mix(float* out, int first, const float* add, float second,
                               const float* none, int third) {
    out[threadIdx.x] = first + second + third + add[threadIdx.x] + (none ? 1000.f : 0.f);
}
extern "C" __global__ void increment(float* x) { x[threadIdx.x] += 1.f; }
extern "C" __global__ void slow(int millions, float* x) {
    long long end = clock64() + millions * 1000000LL;
    while (clock64() < end) {}
    x[threadIdx.x] = 7.f;
}
extern "C" __global__ void through_shared(float* x, int last) {
    extern __shared__ float tile[];
    tile[last - threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[last - threadIdx.x] * 2.f;
}
"""
ONE, WARP = (1, 1, 1), (32, 1, 1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CudaSource:
    """The file above; an absolute path is taken as it is."""
    path = tmp_path_factory.mktemp("launch") / "launch.cu"
    path.write_text(SOURCE)
    return CudaSource(str(path))


def ones(count: int = 32) -> torch.Tensor:
    """On the GPU."""
    return torch.ones(count, device="cuda")


def test_arguments_arrive_as_c_lays_them_out(source: CudaSource) -> None:
    """Pointers, int32 and float32 mixed so that padding is needed; None is a null pointer."""
    mix, out = source.kernel("mix"), ones()
    mix.launch(ONE, WARP, out, 10, ones(), 0.5, None, -3)
    assert out.tolist() == [8.5] * 32
    mix.launch(ONE, WARP, out, 1, ones(), 0.25, out, 2)
    assert out.tolist() == [1004.25] * 32


def test_wrong_arguments_are_named(source: CudaSource) -> None:
    """A tensor elsewhere would be an illegal address at some later call."""
    increment = source.kernel("increment")
    with pytest.raises(LaunchError, match="increment: argument 0 is on cpu"):
        increment.launch(ONE, WARP, torch.ones(32))
    with pytest.raises(TypeError, match="argument 0 is a str"):
        increment.launch(ONE, WARP, "x")
    with pytest.raises(LaunchError, match=r"increment with grid \(1, 1, 1\), block \(2048, 1, 1\)"):
        increment.launch(ONE, (2048, 1, 1), ones())


def test_runs_on_the_current_stream(source: CudaSource) -> None:
    """Two streams do not wait for each other, and each keeps its own order (S-20)."""
    slow, increment = source.kernel("slow"), source.kernel("increment")
    first, second, x, y = torch.cuda.Stream(), torch.cuda.Stream(), ones(), ones()
    increment.load()
    slow.load()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        slow.launch(ONE, WARP, 400, x)
        increment.launch(ONE, WARP, x)
    with torch.cuda.stream(second):
        increment.launch(ONE, WARP, y)
    second.synchronize()
    assert not first.query()
    assert y.tolist() == [2.0] * 32
    first.synchronize()
    assert x.tolist() == [8.0] * 32


def test_is_captured_in_a_graph(source: CudaSource) -> None:
    """Not run at capture; each replay runs every launch with the captured arguments."""
    increment, x = source.kernel("increment"), ones()
    increment.load()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            increment.launch(ONE, WARP, x, launch_dependents=False)
        doubled = x * 2
    assert x.tolist() == [1.0] * 32
    for _ in range(2):
        graph.replay()
    assert (x[0].item(), doubled[0].item()) == (21.0, 42.0)


def test_programmatic_launch_keeps_order(source: CudaSource) -> None:
    """Without griddepcontrol the next kernel waits as ever; below sm_90 the flag does nothing."""
    increment, x = source.kernel("increment"), ones()
    for _ in range(50):
        increment.launch(ONE, WARP, x, launch_dependents=True)
    assert x.tolist() == [51.0] * 32


@pytest.mark.parametrize("kilobytes", [4, 48, 64, 99])
def test_dynamic_shared_memory(source: CudaSource, kilobytes: int) -> None:
    """Above 48 KiB the driver wants to be asked first."""
    kernel, x, last = source.kernel("through_shared"), ones(), kilobytes * 256 - 1
    kernel.launch(ONE, WARP, x, last, shared_bytes=kilobytes * 1024)
    assert x.tolist() == [2.0] * 32


def test_too_much_shared_memory_says_how_much(source: CudaSource) -> None:
    """No card has a megabyte."""
    with pytest.raises(LaunchError, match="asks for 1048576 bytes of dynamic shared memory"):
        source.kernel("through_shared").launch(ONE, WARP, ones(), 0, shared_bytes=1 << 20)


def test_threads_share_a_kernel(source: CudaSource) -> None:
    """A thread that has called nothing of CUDA before has no context; buffers are not shared."""
    increment = source.kernel("increment")
    rows = torch.zeros(8, 32, device="cuda")
    views = [rows[index] for index in range(8)]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(kernel: Kernel, x: torch.Tensor) -> None:
        try:
            for _ in range(200):
                kernel.launch(ONE, WARP, x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(increment, view)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures
    assert rows.unique().tolist() == [200.0]
