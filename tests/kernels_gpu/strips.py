"""Layers in strips on the GPU, their references, and outputs poisoned beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.op import LINEAR
from kernels.linear.reference import linear_reference
from kernels.linear.strip import StripWeights, interleave_halves, to_strips
from kernels.linear.weights import moved
from kernels.pack.packed_linear import PackedLinear
from tests.kernels_cpu.layers import random_layer

CUDA = torch.device("cuda")
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 30, 37, 64)
MARGIN = 4096
"""Poisoned values before and behind an output."""

LAYERS = {
    "w4 g128": {"n": 256, "k": 512, "group": 128, "kind": "symmetric"},
    "w4 g128 offsets, bias, ragged": {"n": 203, "k": 1000, "group": 128, "bias": True},
    "w4 g64 zeros": {"n": 96, "k": 640, "group": 64, "kind": "zeros"},
    "w4 g32 offsets, K = 8": {"n": 5, "k": 8},
    "w4 g32 symmetric, odd K": {"n": 40, "k": 333, "kind": "symmetric"},
    "w4 whole row, offsets": {"n": 64, "k": 1472, "group": -1},
    "w4 g256": {"n": 48, "k": 1024, "group": 256, "kind": "symmetric"},
    "w4 act-order": {"n": 64, "k": 256, "group": 64, "kind": "symmetric", "perm": True},
    "w4 long K": {"n": 33, "k": 8192, "group": 128, "kind": "zeros"},
    "w3 g128": {"n": 256, "k": 512, "bits": 3, "group": 128, "kind": "symmetric"},
    "w3 g128 zeros, bias, ragged": {
        "n": 203,
        "k": 1000,
        "bits": 3,
        "group": 128,
        "kind": "zeros",
        "bias": True,
    },
    "w3 g64 offsets": {"n": 96, "k": 700, "bits": 3, "group": 64},
    "w3 g32": {"n": 17, "k": 264, "bits": 3, "kind": "symmetric"},
    "w3 whole row": {"n": 64, "k": 1472, "bits": 3, "group": -1, "kind": "symmetric"},
}
"""By mechanism: each bit width, group, kind, tail of N and of K."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A layer on the GPU, and in strips."""

    layer: PackedLinear
    strips: StripWeights

    def x(self, m: int, seed: int) -> torch.Tensor:
        """fp16 [m, K], another for each seed."""
        return activations(m, self.layer.in_features, seed)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [M, N]."""
        return linear_reference(x, self.layer)


def case(name: str, seed: int = 0) -> Case:
    """A layer of LAYERS."""
    layer = moved(random_layer(**LAYERS[name], seed=seed), CUDA)
    return Case(layer, to_strips(layer))


def gated_case(bits: int, seed: int = 0) -> Case:
    """A fused gate and up with bias; `layer` in its own order of rows, strips interleaved."""
    layer = random_layer(160, 384, bits, 128, "offsets", bias=True, seed=seed)
    return Case(moved(layer, CUDA), to_strips(moved(interleave_halves(layer), CUDA)))


def activations(m: int, k: int, seed: int) -> torch.Tensor:
    """fp16 [m, k] on the GPU."""
    draw = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(m, k, generator=draw).half().to(CUDA)


class Poisoned:
    """An fp16 [M, N] output of NaN between margins of NaN."""

    def __init__(self, m: int, n: int) -> None:
        self.whole = torch.full((2 * MARGIN + m * n,), float("nan"), dtype=torch.float16).to(CUDA)
        self.y = self.whole[MARGIN : MARGIN + m * n].view(m, n)

    def check(self, want: torch.Tensor, what: str) -> None:
        """All of y written and near `want` [M, N], nothing beside it touched."""
        error = (self.y.float() - want).abs().max() / want.abs().max()
        assert error < LINEAR.allowed("float16"), f"{what}: {error:.1e}"
        assert self.whole[:MARGIN].isnan().all(), f"{what}: wrote before y"
        assert self.whole[-MARGIN:].isnan().all(), f"{what}: wrote behind y"
