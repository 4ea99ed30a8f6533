"""Structures passed by value, and the maps that the tensor memory accelerator reads."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from kernels.jit.driver import LaunchError
from kernels.jit.kernel import CudaSource
from kernels.jit.tensor_map import tensor_map
from kernels.spec.device import compute_capability

pytestmark = pytest.mark.gpu
SOURCE = """\
struct Five { int v[5]; };
extern "C" __global__ void add(float* out, const Five five, int last) {
    out[threadIdx.x] = five.v[threadIdx.x] + last;
}
"""


def test_bytes_arrive_as_a_structure(tmp_path: Path) -> None:
    """Between a pointer and an int, of a size that is no multiple of 8."""
    path = tmp_path / "by_value.cu"
    path.write_text(SOURCE)
    out = torch.full((5,), float("nan"), device="cuda")
    five = struct.pack("5i", 1, -2, 3, -4, 5)
    CudaSource(str(path)).kernel("add").launch((1, 1, 1), (5, 1, 1), out, five, 10)
    assert out.tolist() == [11.0, 8.0, 13.0, 6.0, 15.0]


def test_a_map_is_128_bytes_and_a_bad_one_names_the_shape() -> None:
    """Rows that are no multiple of 16 bytes cannot be mapped."""
    if compute_capability(torch.device("cuda", 0)) < 90:
        pytest.skip("no tensor memory accelerator")
    assert len(tensor_map(torch.zeros(100, 64, device="cuda").half(), 64)) == 128
    with pytest.raises(LaunchError, match=r"a map of fp16 \[3, 9\] in boxes of 64 rows"):
        tensor_map(torch.zeros(3, 9, device="cuda").half(), 64)
