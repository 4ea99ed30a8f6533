"""Every linear backend against the fp32 reference, at shapes chosen by mechanism (S-17, S-24)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.linear.cpu_int4 import CpuInt4, kernel_group
from kernels.linear.cpu_native import CpuNative
from kernels.linear.dense import CpuHalf, Dense
from kernels.linear.exact import TILE_ROWS, ExactTiles
from kernels.linear.op import LINEAR, LinearPolicy, explain_linear, prepare_linear
from kernels.linear.reference import Dequantise, linear_reference
from kernels.linear.weights import Weights, dense_weight, linear_key
from kernels.pack.dense_linear import DenseLinear
from kernels.pack.dequantise import dequantise
from tests.kernels_cpu.layers import random_layer

CPU = torch.device("cpu")
ROWS = (1, 2, 3, 8, 9, 30, 37)
LAYERS = {
    "w4 g32 offsets": {"n": 48, "k": 96},
    "w4 g64 symmetric, bias": {"n": 32, "k": 128, "group": 64, "kind": "symmetric", "bias": True},
    "w4 g128 zeros, K = 192 has a short group": {"n": 16, "k": 192, "group": 128, "kind": "zeros"},
    "w4 g256": {"n": 16, "k": 512, "group": 256},
    "w4 whole row": {"n": 16, "k": 96, "group": -1},
    "w4 act-order": {"n": 32, "k": 64, "perm": True, "bias": True},
    "w3 g32": {"n": 32, "k": 64, "bits": 3},
    "w3 g64 zeros": {"n": 16, "k": 128, "bits": 3, "group": 64, "kind": "zeros"},
    "w8 g32": {"n": 24, "k": 64, "bits": 8},
    "odd sizes": {"n": 21, "k": 35, "group": 16, "bias": True},
    "w3 odd sizes": {"n": 5, "k": 13, "bits": 3, "group": 8},
}
BACKENDS = {
    "cpu.native": (CpuNative(), torch.float32, "float16"),
    "cpu.int4": (CpuInt4(), torch.float32, "bfloat16"),
    "dequantise": (Dequantise(), torch.float32, "float32"),
    "dense fp32": (Dense(), torch.float32, "float32"),
    "dense bf16": (Dense(), torch.bfloat16, "bfloat16"),
    "cpu.half": (CpuHalf(), torch.float32, "float16"),
    "exact": (ExactTiles(), torch.float32, "float32"),
}


def rows(m: int, k: int, seed: int = 1) -> torch.Tensor:
    """Activations."""
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("at_once", [1, 300, 1000])
@pytest.mark.parametrize("layer", LAYERS)
def test_made_dense_in_parts_it_is_the_same(
    layer: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.linear.weights.CODES_AT_ONCE", at_once)
    weights = random_layer(**LAYERS[layer])
    assert torch.equal(dense_weight(weights), dequantise(weights))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_backend_equals_reference(layer: str, backend: str) -> None:
    """Or says why it does not take the layer."""
    weights = random_layer(**LAYERS[layer])
    way, dtype, precision = BACKENDS[backend]
    refusal = way.refuse(linear_key(weights, torch.float32, CPU, backend == "exact"))
    if refusal is not None:
        assert refusal
        return
    run = way.prepare(weights, dtype)
    for m in ROWS:
        x = rows(m, weights.in_features)
        want = linear_reference(x, weights)
        error = (run(x).float() - want).abs().max() / want.abs().max()
        assert error < LINEAR.allowed(precision), f"M = {m}: {error:.1e}"


def test_the_int4_kernel_takes_what_it_should() -> None:
    """All layers but those that misfit; the reasons name the number."""
    taken = {
        name
        for name, shape in LAYERS.items()
        if CpuInt4().refuse(linear_key(random_layer(**shape), torch.float32, CPU, False)) is None
    }
    assert taken == {name for name in LAYERS if not name.startswith(("w8", "odd", "w3 odd"))}
    verdicts = explain_linear(random_layer(21, 64), LinearPolicy(CPU, torch.float32))
    reasons = {verdict.backend: verdict.refusal for verdict in verdicts}
    assert reasons["cpu.int4"] == "N = 21 is not a multiple of 16"


@pytest.mark.parametrize(
    ("k", "group", "expect"),
    [
        (576, 128, 64),  # the last group of 128 is short; in 64s there is none
        (576, 32, 32),
        (512, 512, 256),
        (96, 96, 32),
        (512, 48, None),
        (100, 32, None),
        (64, 16, None),
    ],
)
def test_group_of_the_int4_kernel(k: int, group: int, expect: int | None) -> None:
    """The largest that divides K and never straddles two of ours."""
    assert kernel_group(k, group) == expect


def test_int4_kernel_sees_the_exact_codes() -> None:
    """With scales that bf16 holds and one-hot rows, the kernel returns the weights themselves."""
    layer = random_layer(16, 64, kind="symmetric")
    scales = torch.full_like(layer.scales, 0.25)
    exact = type(layer)(4, 32, 64, layer.qweight, scales)
    run = CpuInt4().prepare(exact, torch.float32)
    assert torch.equal(run(torch.eye(64)).float().T, dequantise(exact))


def test_rows_decide_between_packed_and_dense() -> None:
    """Up to few_rows the packed weights, above it the copy; without a copy always packed."""
    layer = random_layer(32, 64)
    policy = LinearPolicy(CPU, torch.float32, dense=Dense(), few_rows=4)
    linear = prepare_linear(layer, policy)
    assert [linear(rows(m, 64)).dtype for m in (1, 4, 5)] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    ]
    alone = prepare_linear(layer, LinearPolicy(CPU, torch.float32))
    assert alone(rows(64, 64)).dtype == torch.bfloat16


def test_a_layer_the_int4_kernel_refuses_uses_the_copy_always() -> None:
    """Dequantising on every call is never chosen where a dense copy is there."""
    linear = prepare_linear(
        random_layer(24, 64, bits=8), LinearPolicy(CPU, torch.float32, dense=Dense())
    )
    assert linear.packed is None


def test_fp32_weights_are_not_rounded() -> None:
    """A dense checkpoint in fp32 stays fp32 even where half weights would be faster."""
    weights = DenseLinear(rows(8, 16))
    linear = prepare_linear(weights, LinearPolicy(CPU, torch.float32, dense=CpuHalf()))
    x = rows(3, 16, seed=2)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weights.weight))


def test_half_refuses_what_fp16_cannot_hold() -> None:
    """FBGEMM would clamp silently; we say so."""
    weights = DenseLinear(torch.tensor([[1e5, 0.0]]))
    with pytest.raises(ValueError, match="larger than fp16 can hold"):
        CpuHalf().prepare(weights, torch.float32)


def test_dense_linear_refuses_wrong_shapes() -> None:
    """The error names the shape."""
    with pytest.raises(ValueError, match=r"weight must be \[N, K\]"):
        DenseLinear(torch.zeros(3))
    with pytest.raises(ValueError, match=r"bias must have shape \(2,\), got \(3,\)"):
        DenseLinear(torch.zeros(2, 4), torch.zeros(3))


@given(
    m=st.integers(1, 40),
    seed=st.integers(0, 50),
    packed=st.booleans(),
    split=st.integers(0, 40),
)
def test_exact_rows_do_not_depend_on_their_batch(
    m: int, seed: int, packed: bool, split: int
) -> None:
    """Any order, any split, any place in a tile: the same bits."""
    weights: Weights = (
        random_layer(40, 64, bias=True) if packed else DenseLinear(rows(40, 64, seed=7))
    )
    run = ExactTiles().prepare(weights, torch.float32)
    x = rows(m, 64, seed)
    whole = run(x)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(run(x[order]), whole[order])
    cut = split % m
    parts = [run(part) for part in (x[:cut], x[cut:]) if len(part)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(run(x[-1:]), whole[-1:])


def test_exact_falls_back_to_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GEMM cares for a row's place in the tile, tiles have one row."""
    monkeypatch.setattr("kernels.linear.exact.place_does_not_matter", lambda weight: False)
    weights = DenseLinear(rows(8, 16))
    x = rows(TILE_ROWS + 1, 16, seed=3)
    want = torch.cat([torch.mm(row[None], weights.weight.T) for row in x])
    assert torch.equal(ExactTiles().prepare(weights, torch.float32)(x), want)
