"""The seed's kernels, and dequantise + cuBLAS, against the fp32 reference on a GPU (S-01 to S-17).

Every output starts as NaN, so that an element which is not written fails; every case has data of
its own.
"""

from __future__ import annotations

import pytest
import torch

from kernels.linear.cuda import BACKENDS, EXPERIMENTS, Cuda, CudaBackend
from kernels.linear.dequantise_cublas import DequantiseCublas, dequantise_rows, rows_at_once
from kernels.linear.op import LINEAR
from kernels.linear.packed_bytes import packed_bytes
from kernels.linear.reference import linear_reference
from kernels.linear.seed import SeedBatchTile, SeedGemv, SeedTiled
from kernels.linear.seed_fallback import SeedFallback
from kernels.linear.weights import linear_key, moved
from kernels.pack.dequantise import dequantise
from kernels.pack.packed_linear import PackedLinear
from tests.kernels_cpu.layers import random_layer

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 30, 37, 64, 65, 128, 257, 512)
SHAPES = {
    "g128": {"n": 192, "k": 512, "group": 128, "kind": "symmetric"},
    "g32 offsets, ragged N": {"n": 200, "k": 352, "group": 32, "kind": "offsets", "bias": True},
    "g64 zeros, N of one block and a bit": {"n": 65, "k": 192, "group": 64, "kind": "zeros"},
    "whole row": {"n": 72, "k": 320, "group": -1, "kind": "symmetric"},
    "short last group": {"n": 48, "k": 200, "group": 128, "kind": "zeros"},
    "act-order": {"n": 40, "k": 128, "group": 32, "kind": "offsets", "perm": True, "bias": True},
    "odd K": {"n": 21, "k": 35, "group": 16, "kind": "offsets"},
    "K of less than two groups": {"n": 5, "k": 13, "group": 8, "kind": "zeros"},
    "even K in no eights": {"n": 33, "k": 102, "group": -1, "kind": "zeros", "bias": True},
}
WAYS: tuple[CudaBackend, ...] = (
    *(way for way in (*BACKENDS, *EXPERIMENTS) if "seed" in way.name or "cublas" in way.name),
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, so an output or a scratch that is read unwritten shows."""
    plain = torch.empty

    def empty(*size: int, **given: object) -> torch.Tensor:
        made: torch.Tensor = plain(*size, **given)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", empty)


def on_gpu(seed: int = 0, **shape: object) -> PackedLinear:
    """A random layer on the GPU."""
    return moved(random_layer(seed=seed, **shape), torch.device("cuda"))


def rows_of(m: int, k: int, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Activations."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=draw).to("cuda", dtype)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest value; NaN anywhere gives NaN, which no bound passes."""
    return float((found.float() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("bits", [4, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_equals_the_reference(way: CudaBackend, shape: str, bits: int) -> None:
    """At every number of rows, or it refuses the shape with a reason."""
    layer = on_gpu(bits=bits, seed=len(shape), **SHAPES[shape])
    refusal = way.refuse(linear_key(layer, torch.float16, layer.qweight.device, exact=False))
    if refusal is not None:
        assert "K = " in refusal or "bits" in refusal
        return
    run = way.prepare(layer, torch.float16)
    for m in ROWS:
        x = rows_of(m, layer.in_features, seed=m)
        y = run(x)
        assert y.shape == (m, layer.out_features)
        assert relative_error(y, linear_reference(x, layer)) < LINEAR.allowed("float16"), f"M = {m}"


@pytest.mark.parametrize("bits", [4, 3, 8])
def test_dequantised_rows_are_the_reference(bits: int) -> None:
    """Bit for bit what fp32 rounds to, in both half types, from any row on."""
    layer = on_gpu(bits=bits, n=70, k=264, group=64, kind="zeros")
    wanted = dequantise(layer)
    for dtype in (torch.float16, torch.bfloat16):
        for first, count in ((0, 70), (13, 20), (69, 1)):
            dense = torch.empty(count, 264, dtype=dtype, device="cuda")
            dequantise_rows(packed_bytes(layer), first, dense)
            assert torch.equal(dense, wanted[first : first + count].to(dtype))


def test_slices_of_the_dense_scratch_meet() -> None:
    """A layer larger than the scratch is done in slices that leave no gap (S-01)."""
    layer = on_gpu(n=3000, k=64, group=32)
    at_once = rows_at_once(3000, 64 * 1024)
    assert at_once == 1000
    x = rows_of(5, 64, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.linear.dequantise_cublas.rows_at_once", lambda n, k: 1000)
        y = DequantiseCublas().prepare(layer, torch.float16)(x)
    assert relative_error(y, linear_reference(x, layer)) < LINEAR.allowed("float16")


@pytest.mark.parametrize("policy", ["tuned", "seed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 3])
def test_the_dispatcher_serves_any_number_of_rows(
    bits: int, dtype: torch.dtype, policy: str
) -> None:
    """Whatever it chooses is right and has the dtype that was asked."""
    layer = on_gpu(bits=bits, n=96, k=256, group=64, kind="offsets", bias=True)
    run = Cuda(policy).prepare(layer, dtype)  # type: ignore[arg-type]
    allowed = LINEAR.allowed(str(dtype).removeprefix("torch."))
    for m in (0, *ROWS, 1025):
        x = rows_of(m, 256, seed=m, dtype=dtype)
        y = run(x)
        assert (y.shape, y.dtype) == ((m, 96), dtype)
        assert m == 0 or relative_error(y, linear_reference(x, layer)) < allowed


def test_the_dispatcher_is_captured_in_a_graph() -> None:
    """All allocations are torch's, nothing waits for the device."""
    layer = on_gpu(n=96, k=256, group=64)
    run = Cuda().prepare(layer, torch.float16)
    inputs = [rows_of(m, 256, seed=m) for m in (1, 8, 37, 300)]
    for x in inputs:
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [run(x) for x in inputs]
    for x in inputs:
        x.mul_(-2)
    graph.replay()
    for x, y in zip(inputs, outputs, strict=True):
        assert relative_error(y, linear_reference(x, layer)) < LINEAR.allowed("float16")


def cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    """Of the two as one long vector."""
    return float(torch.cosine_similarity(left.float().flatten(), right.float().flatten(), dim=0))


def tiled_against_fallback(bits: int) -> None:
    """M = 37, the tiled kernel forced, the module's own dequantised weights as the reference."""
    layer = on_gpu(bits=bits, n=256, k=512, group=128, kind="symmetric")
    x = rows_of(37, 512, seed=3)
    tiled = SeedTiled().prepare(layer, torch.float16)(x)
    fallback = SeedFallback(layer)
    wanted = torch.nn.functional.linear(x, fallback.dequantize())
    assert cosine(tiled, wanted) > 0.99999
    assert float((tiled.float() - wanted.float()).abs().mean()) < 2e-3
    assert cosine(fallback.forward_dequant_cublas(x), wanted) > 0.99999


def test_w4a16_tiled_prefill_matches_dequantized_reference() -> None:
    """The seed's own check, by its name (S-25)."""
    tiled_against_fallback(bits=4)


def test_w3a16_tiled_prefill_matches_dequantized_reference() -> None:
    """The seed's own check, by its name (S-26)."""
    tiled_against_fallback(bits=3)


@pytest.mark.parametrize("rows", [2, 3, 8, 9])
@pytest.mark.parametrize("bits", [4, 3])
def test_batch_tile_equals_single_rows(bits: int, rows: int) -> None:
    """W4's batched GEMV (S-28) and W3's experiment (S-29): the same sums, in the same order."""
    layer = on_gpu(bits=bits, n=130, k=256, group=128, kind="symmetric")
    x = rows_of(rows, 256, seed=rows)
    together = SeedBatchTile(bits).prepare(layer, torch.float16)(x)
    single = SeedGemv().prepare(layer, torch.float16)
    alone = torch.cat([single(row[None]) for row in x])
    assert relative_error(together, alone.float()) < 1e-3
    assert torch.equal(single(x), alone)


def test_no_dense_copy_of_the_weights() -> None:
    """The tiled kernel needs no more than its tiles: beside y, nothing is allocated (S-01)."""
    layer = on_gpu(n=4096, k=1024, group=128, kind="symmetric")
    run, x = SeedTiled().prepare(layer, torch.float16), rows_of(30, 1024, seed=1)
    run(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = run(x)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown <= y.numel() * 2 + 1024
