"""Ways to multiply by 3- and 4-bit weights, each as calls over many copies of one layer.

Knows shapes and torch; nothing of time. Every contender is checked against the same fp32 reference.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.linear.cuda import Cuda
from kernels.linear.dequantise_cublas import DequantiseCublas
from kernels.linear.row_policy import seed_names
from kernels.linear.seed import SeedBatchTile, SeedGemv, SeedTiled
from kernels.linear.strip import to_strips
from kernels.linear.strip_few import StripFew
from kernels.linear.strip_gemm import GemmAmpere
from kernels.linear.strip_gemm_hopper import GemmHopper
from kernels.linear.weights import linear_key
from kernels.pack.dequantise import dequantise
from kernels.pack.packed_linear import PackedLinear

Call = Callable[[torch.Tensor], torch.Tensor]
Maker = Callable[[Sequence[PackedLinear], int], list[Call]]
GROUP = 128
CUDA = torch.device("cuda")
MARLIN_PACKAGES = ("vllm", "marlin", "gptqmodel")


@dataclass(frozen=True, slots=True)
class Contender:
    """One column of the table. bits: of the weights it reads, 16 for dense ones. least_rows: below
    it is not asked. tolerance: relative error, Frobenius. dtype: of x.
    """

    name: str
    bits: tuple[int, ...]
    make: Maker
    least_rows: int = 1
    tolerance: float = 3e-3
    dtype: torch.dtype = torch.float16


def random_layers(n: int, k: int, bits: int, copies: int, seed: int) -> list[PackedLinear]:
    """Layers of random codes with scales of both signs, groups of 128, on the GPU."""
    draw = torch.Generator(device=CUDA).manual_seed(seed)

    def layer() -> PackedLinear:
        shape = (n, -(-k * bits // 8))
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=CUDA, generator=draw)
        scales = torch.randn(n, -(-k // GROUP), device=CUDA, generator=draw) * 0.01
        return PackedLinear(bits, GROUP, k, codes, scales.half())

    return [layer() for _ in range(copies)]


def ours(layers: Sequence[PackedLinear], m: int) -> list[Call]:
    """What the shipped tables take for each number of rows."""
    return [Cuda().prepare(layer, torch.float16) for layer in layers]


def ours_few(layers: Sequence[PackedLinear], m: int) -> list[Call]:
    """The family for few rows; a launch may load weights before the one ahead of it has ended."""
    return [StripFew(to_strips(layer)) for layer in layers]


def ours_apart(layers: Sequence[PackedLinear], m: int) -> list[Call]:
    """The same, launched one after the other."""
    return [StripFew(to_strips(layer), launch_dependents=False) for layer in layers]


def ours_many(layers: Sequence[PackedLinear], m: int) -> list[Call]:
    """The wgmma GEMM for many rows: where does it begin to win?"""
    return [GemmHopper().prepare(layer, torch.float16) for layer in layers]


def ours_mma_sync(layers: Sequence[PackedLinear], m: int) -> list[Call]:
    """What cards before sm_90 take for many rows."""
    return [GemmAmpere().prepare(layer, torch.float16) for layer in layers]


def seed(layers: Sequence[PackedLinear], m: int) -> list[Call]:
    """The seed's kernels by the seed's rule."""
    backends = {each.name: each for each in (SeedGemv(), SeedBatchTile(4), SeedTiled())}

    def prepared(layer: PackedLinear) -> Call:
        key = replace(linear_key(layer, torch.float16, CUDA, exact=False), m=m)
        name = seed_names(key)[0]
        return backends[name].prepare(layer, torch.float16)

    return [prepared(layer) for layer in layers]


def dequantise_cublas(layers: Sequence[PackedLinear], m: int) -> list[Call]:
    """Weights made dense by one of our kernels on each call, then cuBLAS."""
    return [DequantiseCublas().prepare(layer, torch.float16) for layer in layers]


def cublas(layers: Sequence[PackedLinear], m: int) -> list[Call]:
    """fp16 weights: what quantisation is to beat."""
    n, k = layers[0].out_features, layers[0].in_features
    first = dequantise(layers[0]).half()
    dense = [first, *(torch.randn(n, k, device=CUDA).half() for _ in layers[1:])]
    return [_product(weight) for weight in dense]


def _product(weight: torch.Tensor) -> Call:
    return lambda x: torch.mm(x, weight.T)


def torch_int4(layers: Sequence[PackedLinear], m: int) -> list[Call]:
    """torch's own kernel: bf16, W4 only; x is given in bf16."""
    return [_int4_call(layer) for layer in layers]


def _int4_call(layer: PackedLinear) -> Call:
    # Its codes are unsigned, the even column in the high half.
    codes = layer.qweight ^ 0x88
    swapped = (codes << 4) | (codes >> 4)
    packed = torch._convert_weight_to_int4pack(swapped, 8)
    scales = layer.scales.T.to(torch.bfloat16)
    pairs = torch.stack((scales, torch.zeros_like(scales)), dim=-1).contiguous()

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch._weight_int4pack_mm(x, packed, GROUP, pairs)

    return run


CONTENDERS = (
    Contender("ours", (4, 3), ours),
    Contender("ours, strips", (4, 3), ours_few),
    Contender("ours, launches apart", (4, 3), ours_apart),
    Contender("ours, many rows", (4, 3), ours_many, least_rows=16),
    Contender("ours, mma.sync", (4, 3), ours_mma_sync, least_rows=65),
    Contender("seed", (4, 3), seed),
    Contender("dequantise + cuBLAS", (4, 3), dequantise_cublas),
    Contender("cuBLAS fp16", (16,), cublas),
    Contender("torch int4 (bf16)", (4,), torch_int4, tolerance=2e-2, dtype=torch.bfloat16),
)


def missing_contenders() -> list[str]:
    """Notes on peers that are not installed here."""
    found = [name for name in MARLIN_PACKAGES if importlib.util.find_spec(name)]
    if found:
        return [f"Marlin: {', '.join(found)} is installed, but this bench does not call it"]
    names = ", ".join(MARLIN_PACKAGES)
    return [f"Marlin: none of {names} is installed here; see the peers of another run"]
