"""Bytes and FLOPs of a linear layer, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.linear.cost import weight_bytes
from kernels.linear.op import LINEAR
from kernels.linear.weights import linear_key
from kernels.spec.op import OpKey
from tests.kernels_cpu.layers import random_layer

KEY = OpKey("linear", "cuda", "float16", m=30, n=5632, k=2048, bits=4, group=128)


def test_by_hand() -> None:
    """5,632 rows of 1,024 bytes of codes and 16 scales; x and y in fp16."""
    assert weight_bytes(KEY) == 5632 * (1024 + 32) == 5_947_392
    assert weight_bytes(replace(KEY, bits=3)) == 5632 * (768 + 32)
    assert weight_bytes(replace(KEY, bits=0)) == 5632 * 2048 * 2
    assert LINEAR.bytes_of is not None
    assert LINEAR.bytes_of(KEY) == 5_947_392 + 2 * 30 * (2048 + 5632)
    assert LINEAR.flops_of is not None
    assert LINEAR.flops_of(KEY) == 692_060_160


@pytest.mark.parametrize("kind", ["symmetric", "offsets", "zeros"])
@pytest.mark.parametrize(("bits", "k", "group"), [(4, 192, 128), (3, 35, 16), (8, 64, -1)])
def test_weights_are_what_the_tensors_hold(bits: int, k: int, group: int, kind: str) -> None:
    """Short groups and odd columns included."""
    layer = random_layer(6, k, bits=bits, group=group, kind=kind)
    key = linear_key(layer, torch.float16, torch.device("cpu"), exact=False)
    assert weight_bytes(key) == layer.nbytes
