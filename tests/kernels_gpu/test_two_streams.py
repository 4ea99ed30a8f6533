"""One layer on two streams at once: what a decode and a prefill of the same layers do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.attention.cuda import CudaAttention, plan_attention_cuda
from kernels.linear.many_rows import ManyRows
from kernels.linear.strip_few import FewRows
from kernels.linear.strip_gemm import GemmAmpere
from kernels.linear.strip_gemm_hopper import GemmHopper
from kernels.linear.weights import LinearFn, linear_key, moved
from kernels.spec.op import OpKey
from tests.kernels_cpu.layers import random_layer
from tests.kernels_gpu.paged import poisoned_cache, queries, ragged

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
TIMES = 200
Run = Callable[[], torch.Tensor]


def at_once(first: Run, second: Run) -> None:
    """Both TIMES times on streams of their own; every result has the bits of a run alone."""
    runs = (first, second)
    want = [run() for run in runs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    got: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for _ in range(TIMES):
        for run, stream, results in zip(runs, streams, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(run())
    torch.cuda.synchronize()
    for results, expect in zip(got, want, strict=True):
        assert [i for i, y in enumerate(results) if not torch.equal(y, expect)] == []


def prepared(backend: FewRows | GemmAmpere | GemmHopper, k: int) -> LinearFn:
    """A W4 layer of 256 out-features, few enough for K to be split."""
    layer = moved(random_layer(256, k, 4, 128, "symmetric", seed=k), CUDA)
    key: OpKey = linear_key(layer, torch.float16, CUDA, exact=False)
    if (reason := backend.refuse(key)) is not None:
        pytest.skip(reason)
    return backend.prepare(layer, torch.float16)


@pytest.mark.parametrize("rows", [(16, 300), (65, 65)])
@pytest.mark.parametrize("backend", [FewRows(), GemmAmpere(), GemmHopper()], ids=lambda b: b.name)
def test_one_layer(backend: FewRows | GemmAmpere | GemmHopper, rows: tuple[int, int]) -> None:
    """K is split, so that blocks of either call meet at counters."""
    run = prepared(backend, 4096)
    if isinstance(run, ManyRows):
        assert all(run.plan_for(m).splits > 1 for m in rows)
    inputs = [torch.randn(m, 4096, device=CUDA).half() for m in rows]
    at_once(lambda: run(inputs[0]), lambda: run(inputs[1]))


def test_one_layer_in_two_graphs() -> None:
    """Captured one after the other on one stream, replayed beside each other."""
    run = prepared(GemmAmpere(), 4096)
    inputs = [torch.randn(m, 4096, device=CUDA).half() for m in (65, 80)]
    want = [run(x) for x in inputs]
    graphs, got = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], []
    capturing = torch.cuda.Stream()
    for graph, x in zip(graphs, inputs, strict=True):
        with torch.cuda.graph(graph, stream=capturing):
            got.append([run(x) for _ in range(20)])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(TIMES // 20):
        for results in got:
            for y in results:
                y.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for results, expect in zip(got, want, strict=True):
            assert all(torch.equal(y, expect) for y in results)


def test_one_cache_layer() -> None:
    """Two steps' attention over the same cache, sequences split, each with a plan of its own."""
    attend = CudaAttention()
    case = ragged([1] * 4, [3000] * 4)
    kv = poisoned_cache(case, 2, 128, torch.float16)
    runs = []
    for _ in range(2):
        plan = plan_attention_cuda(case.q_lens, case.kv_lens, case.block_lists, 16, CUDA)
        q = queries(case.rows, 16, 128, torch.float16)
        runs.append(lambda q=q, plan=plan: attend(q, kv, plan))
    at_once(*runs)
