"""Which fused gates and ups end in silu(gate) * up inside their kernels, and what the others do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.linear import cuda
from kernels.linear.cuda import Cuda
from kernels.linear.op import LinearPolicy, prepare_gate_up
from kernels.linear.reference import linear_reference
from kernels.linear.strip import interleave_halves
from kernels.linear.strip_dense import gated_product
from kernels.spec.op import OpKey
from tests.kernels_cpu.layers import random_layer

KEY = OpKey("linear", "cuda", "float16", n=11008 * 2, k=2048, bits=4, group=128, sm=86)


@pytest.mark.parametrize("sm", [80, 86, 90])
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, None),
        ({"bits": 3}, None),
        ({"dtype": "bfloat16"}, None),
        ({"affine": "zeros", "group": 64}, None),
        ({"n": 40}, "not a multiple of 16"),
        ({"bits": 8, "group": 32}, "reads no strips"),
        ({"device": "cpu"}, "runs on a GPU only"),
    ],
)
def test_strips_for_every_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, sm: int, asked: dict[str, object], why: str | None
) -> None:
    """Prompts and decodes read one copy, so all of their kernels must read strips."""
    monkeypatch.setattr(cuda, "why_no_jit", lambda: None)
    refusal = Cuda().refuse_gated(replace(KEY, sm=sm, **asked))
    assert refusal is None if why is None else why in (refusal or "")


def test_the_seeds_kernels_have_no_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline stays as it was."""
    monkeypatch.setattr(cuda, "why_no_jit", lambda: None)
    assert Cuda("seed").refuse_gated(KEY) == "cuda.seed_gemv reads no strips"


def test_on_a_cpu_nothing_is_interleaved() -> None:
    """The compiled layers read gate and up as they come."""
    layer = random_layer(n=64, k=128)
    linear = prepare_gate_up(layer, LinearPolicy(torch.device("cpu"), torch.float32))
    assert not linear.gated
    assert linear(torch.randn(3, 128)).shape == (3, 64)


def test_the_product_of_interleaved_rows() -> None:
    """Eights of gates, each before its ups."""
    layer = random_layer(n=96, k=64, bias=True)
    x = torch.randn(5, 64)
    gate, up = linear_reference(x, layer).chunk(2, dim=-1)
    got = gated_product(linear_reference(x, interleave_halves(layer)))
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up)
