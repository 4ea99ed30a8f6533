"""The backend as a model uses it: its own choice of kernel, streams' order, graphs."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.op import LINEAR
from kernels.linear.strip_few import FewRows, StripFew
from kernels.linear.weights import linear_key
from tests.kernels_gpu.strips import CUDA, LAYERS, ROWS, activations, case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", LAYERS)
def test_backend_equals_the_reference(name: str) -> None:
    """Every number of rows, through refuse() and prepare(), x in fp16 and in fp32."""
    given = case(name, seed=11)
    backend = FewRows()
    assert backend.refuse(linear_key(given.layer, torch.float16, CUDA, exact=False)) is None
    linear = backend.prepare(given.layer, torch.float16)
    for m in ROWS:
        x = given.x(m, m)
        want = given.reference(x)
        for y in (linear(x), linear(x.float())):
            error = (y.float() - want).abs().max() / want.abs().max()
            assert error < LINEAR.allowed("float16"), f"M = {m}: {error:.1e}"


def test_no_rows_and_too_many() -> None:
    """Zero rows are zero rows; 65 are an error that says so."""
    layer = StripFew(case("w4 g128").strips)
    assert layer(activations(0, 512, 0)).shape == (0, 256)
    with pytest.raises(ValueError, match="65 rows"):
        layer(activations(65, 512, 0))


@pytest.mark.parametrize("m", [1, 8, 16, 64])
def test_a_chain_may_overlap_its_launches(m: int) -> None:
    """Each call reads what the one before wrote, and may start before it ends: the same bits as in
    plain order, also when captured in a graph.
    """
    given = case("w4 g128", seed=2)
    square = case("w3 g128", seed=2)
    x = given.x(m, 0)

    def chain(overlap: bool) -> torch.Tensor:
        first = StripFew(given.strips, launch_dependents=overlap)
        second = StripFew(square.strips, launch_dependents=overlap)
        y = x
        for _ in range(20):
            half = first(y) * 0.02
            y = second(torch.cat((half, half), dim=-1)) * 0.02
            y = torch.cat((y, y), dim=-1)
        return y

    want = chain(overlap=False)
    assert want.isfinite().all()
    assert torch.equal(chain(overlap=True), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(overlap=True)
    got.fill_(float("nan"))
    graph.replay()
    assert torch.equal(got, want)
