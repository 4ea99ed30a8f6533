"""The backend as a model uses it: its own choice of kernel, streams' order, graphs."""

from __future__ import annotations

from dataclasses import replace

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


def test_no_rows_and_many() -> None:
    """Zero rows are zero rows; more than it is meant for are still right, and refused by key."""
    given = case("w4 g128")
    layer = StripFew(given.strips)
    assert layer(activations(0, 512, 0)).shape == (0, 256)
    x = given.x(131, 0)
    want = given.reference(x)
    assert (layer(x).float() - want).abs().max() / want.abs().max() < LINEAR.allowed("float16")
    key = replace(linear_key(given.layer, torch.float16, CUDA, exact=False), m=65)
    assert FewRows().refuse(key) == "65 rows of x, at most 64 are worth it"


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
