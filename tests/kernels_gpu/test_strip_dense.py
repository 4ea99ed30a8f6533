"""Strips made dense slice by slice, then cuBLAS: against the fp32 reference (S-24)."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.op import LINEAR
from kernels.linear.reference import linear_reference
from kernels.linear.strip import to_strips
from kernels.linear.strip_dense import LEAST_ROWS, StripCublas, make_dense, rows_at_once
from kernels.pack.dequantise import dequantise_stored
from tests.kernels_gpu.gemm_cases import CUDA, LAYERS, layer_of, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", LAYERS)
def test_dense_rows_are_the_weights_rounded_once(name: str) -> None:
    """From any strip on; columns stay as stored."""
    layer = layer_of(name, seed=1)
    columns = -(-layer.in_features // 8) * 8
    for first in (0, 2):
        rows = min(layer.out_features - 16 * first, 40)
        dense = torch.full((rows, columns), float("nan"), device=CUDA).half()
        make_dense(to_strips(layer), first, dense)
        want = dequantise_stored(layer)[16 * first : 16 * first + rows]
        torch.testing.assert_close(
            dense[:, : layer.in_features].float(), want, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("name", LAYERS)
def test_equals_reference_whatever_the_slices(name: str) -> None:
    """One slice and several."""
    layer = layer_of(name, seed=2)
    x = torch.randn(130, layer.in_features, device=CUDA).half()
    want = linear_reference(x, layer)
    for slice_bytes in (1, 64 << 20):
        run = StripCublas().prepare_strips(to_strips(layer), torch.float16, slice_bytes=slice_bytes)
        poison(want.half())
        error = float((run(x).float() - want).abs().max() / want.abs().max())
        assert error < LINEAR.allowed("float16")


def test_slices_are_whole_strips_of_even_size() -> None:
    """22016 x 2048 in 32 MiB is three slices; never less than 1,024 out-features but for all."""
    assert rows_at_once(22016, 2048, 32 << 20) == 7344
    assert rows_at_once(2048, 11008, 1) == LEAST_ROWS
    assert rows_at_once(5, 64, 1 << 20) == 16
