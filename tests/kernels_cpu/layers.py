"""Random packed layers for the tests of the linears."""

from __future__ import annotations

import torch

from kernels.pack.dequantise import pack_codes
from kernels.pack.packed_linear import PackedLinear


def random_layer(
    n: int,
    k: int,
    bits: int = 4,
    group: int = 32,
    kind: str = "offsets",
    bias: bool = False,
    perm: bool = False,
    seed: int = 0,
) -> PackedLinear:
    """kind: symmetric, offsets or zeros. Scales of both signs."""
    draw = torch.Generator().manual_seed(seed)
    low = -(2 ** (bits - 1))
    codes = torch.randint(low, -low, (n, k), generator=draw)
    groups = -(-k // (k if group == -1 else group))
    scales = (torch.randn(n, groups, generator=draw) * 0.05).half()
    offsets = zeros = None
    if kind == "offsets":
        offsets = (torch.randn(n, groups, generator=draw) * 0.05).half()
    elif kind == "zeros":
        zeros = torch.randint(low, -low, (n, groups), generator=draw).to(torch.int8)
    return PackedLinear(
        bits,
        group,
        k,
        pack_codes(codes, bits),
        scales,
        offsets,
        zeros,
        torch.randn(n, generator=draw) if bias else None,
        torch.randperm(k, generator=draw).to(torch.int32) if perm else None,
    )
