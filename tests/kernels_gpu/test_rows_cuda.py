"""Norms, gated SiLU, embedding lookup and the INT8 head on the GPU against their definitions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.elementwise.cuda import CudaRows
from kernels.elementwise.embedding import gather_rows_cuda, refuse_gather
from kernels.elementwise.op import rms_norm_reference, silu_mul_reference
from kernels.linear.reference import linear_reference
from kernels.linear.w8_gemv import W8Gemv, W8GemvLinear
from kernels.linear.w8_rows import W8Rows, W8RowsLinear
from kernels.linear.weights import linear_key
from kernels.pack.dequantise import gather_rows, pack_codes
from kernels.pack.packed_linear import PackedLinear

pytestmark = pytest.mark.gpu

ROWS = CudaRows()
EPS = 1e-6
DTYPES = {"float16": (torch.float16, 1.5e-3), "bfloat16": (torch.bfloat16, 1.2e-2)}
ROW_COUNTS = (1, 2, 7, 64, 300)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 2048, 3584, 8192, 11008])
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_norms(rows: int, width: int, name: str) -> None:
    """The sum is rounded to the residual's dtype first, as two separate ops would."""
    dtype, tolerance = DTYPES[name]
    x = (torch.randn(rows, width, device="cuda") * 3).to(dtype)
    delta, weight = torch.randn_like(x), torch.rand(width, device="cuda") + 0.5
    got = ROWS.norm(weight, EPS)(x)
    want = rms_norm_reference(x, weight, EPS)
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)
    total = x + delta
    got = ROWS.add_norm(weight, EPS)(x, delta)
    want = rms_norm_reference(total, weight, EPS)
    assert torch.equal(x, total)
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [64, 2048, 8192, 11008])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_norms_of_a_wide_residual(rows: int, width: int) -> None:
    """fp32 in, beyond what fp16 holds; fp16 out, as the linears want it."""
    wide = CudaRows(narrow=torch.float16)
    x = torch.randn(rows, width, device="cuda") * 3
    x[:, 5] = 3e5
    delta, weight = torch.randn_like(x).half(), torch.rand(width, device="cuda") + 0.5
    got = wide.norm(weight, EPS)(x)
    assert got.dtype == torch.float16
    want = rms_norm_reference(x, weight, EPS)
    torch.testing.assert_close(got.float(), want, rtol=1.5e-3, atol=1e-5)
    total = x + delta
    got = wide.add_norm(weight, EPS)(x, delta)
    assert got.dtype == torch.float16
    assert torch.equal(x, total)
    want = rms_norm_reference(total, weight, EPS)
    torch.testing.assert_close(got.float(), want, rtol=1.5e-3, atol=1e-5)


def test_other_tensors_take_the_torch_way() -> None:
    """fp32, odd widths, slices with gaps."""
    for x in (
        torch.randn(3, 64, device="cuda"),
        torch.randn(3, 37, device="cuda").half(),
        torch.randn(3, 128, device="cuda").half()[:, ::2],
    ):
        weight = torch.rand(x.shape[1], device="cuda")
        want = rms_norm_reference(x, weight, EPS)
        got = ROWS.norm(weight, EPS)(x)
        torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-3)
        got = ROWS.add_norm(weight, EPS)(x.clone(), torch.zeros_like(x))
        torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-3)
    gate_up = torch.randn(3, 2 * 37, device="cuda").half()
    got = ROWS.silu_mul(gate_up.clone()).float()
    torch.testing.assert_close(got, silu_mul_reference(gate_up), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("width", [8, 1536, 11008, 18944])
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_silu_mul(rows: int, width: int, name: str) -> None:
    dtype, tolerance = DTYPES[name]
    gate_up = (torch.randn(rows, 2 * width, device="cuda") * 4).to(dtype)
    gate_up[0, 0], gate_up[0, 1] = 200.0, -200.0
    got = ROWS.silu_mul(gate_up)
    want = silu_mul_reference(gate_up)
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


def packed(
    n: int, k: int, bits: int, group: int, affine: str = "", device: str = "cuda"
) -> PackedLinear:
    """Random codes and scales of either sign."""
    half = 1 << (bits - 1)
    codes = pack_codes(torch.randint(-half, half, (n, k), dtype=torch.int16), bits)
    shape = (n, -(-k // (k if group == -1 else group)))
    scales = (torch.randn(shape) * 0.02).half()
    offsets = torch.randn(shape).half() if affine == "offsets" else None
    zeros = torch.randint(-4, 4, shape, dtype=torch.int8) if affine == "zeros" else None
    moved = [None if t is None else t.to(device) for t in (codes, scales, offsets, zeros)]
    assert moved[0] is not None
    assert moved[1] is not None
    return PackedLinear(bits, group, k, moved[0], moved[1], offsets=moved[2], zeros=moved[3])


@pytest.mark.parametrize("affine", ["", "offsets", "zeros"])
@pytest.mark.parametrize(
    ("bits", "k", "group"), [(8, 576, 32), (8, 100, -1), (4, 2048, 128), (4, 77, 32), (3, 64, 32)]
)
def test_embedding_has_the_bits_of_gather_rows(bits: int, k: int, group: int, affine: str) -> None:
    table = packed(50, k, bits, group, affine)
    ids = torch.tensor([0, 49, 7, 7, 23], device="cuda")
    for dtype, _ in DTYPES.values():
        got = gather_rows_cuda(table, ids, dtype)
        assert torch.equal(got, gather_rows(table, ids).to(dtype))
    assert (refuse_gather(table, torch.float16) is None) == (bits != 3)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "group"),
    [(4096, 2048, -1), (1000, 576, 32), (37, 256, 64), (515, 3584, 128), (33, 64, -1)],
)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17])
def test_w8_gemv(rows: int, n: int, k: int, group: int, name: str) -> None:
    """Ragged N, every group; 17 rows go the dequantised way."""
    dtype, _ = DTYPES[name]
    weights, backend = packed(n, k, 8, group), W8Gemv()
    key = linear_key(weights, dtype, torch.device("cuda"), exact=False)
    assert backend.refuse(key) is None
    x = torch.randn(rows, k, device="cuda").to(dtype)
    got = backend.prepare(weights, dtype)(x)
    want = linear_reference(x, weights)
    assert got.dtype == dtype
    # Beyond 16 rows the weights themselves are rounded to the activations' dtype.
    allowed = {"bfloat16": 4e-3, "float16": 5e-4}[name] * (1 if rows <= 16 else 4)
    assert (got.float() - want).abs().max() < allowed * want.abs().max()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(4096, 2048), (37, 64), (515, 3584), (1000, 576)])
@pytest.mark.parametrize("rows", [1, 17, 24, 32, 33, 64, 65, 130])
def test_w8_rows(rows: int, n: int, k: int, name: str) -> None:
    """Ragged N and M, one step and many."""
    dtype, _ = DTYPES[name]
    weights, backend = packed(n, k, 8, -1), W8Rows()
    assert backend.refuse(linear_key(weights, dtype, torch.device("cuda"), exact=False)) is None
    x = torch.randn(rows, k, device="cuda").to(dtype)
    got = backend.prepare(weights, dtype)(x)
    want = linear_reference(x, weights)
    assert got.dtype == dtype
    allowed = {"bfloat16": 4e-3, "float16": 5e-4}[name]
    assert (got.float() - want).abs().max() < allowed * want.abs().max()


@pytest.mark.parametrize("backend", [W8Gemv(), W8Rows()])
@pytest.mark.parametrize("rows", [1, 9, 16, 40])
def test_8_bit_layers_write_fp32(backend: W8Gemv | W8Rows, rows: int) -> None:
    """Where it is told to, the sums themselves; in the dtype of x they are rounded."""
    weights = packed(777, 512, 8, -1)
    weights = dataclasses.replace(weights, bias=torch.randn(777, device="cuda"))
    run = backend.prepare(weights, torch.float16)
    assert isinstance(run, W8GemvLinear | W8RowsLinear)
    x = torch.randn(rows, 512, device="cuda").half()
    wide = torch.empty(rows, 777, device="cuda")
    run.into(x, wide)
    if backend.name == "cuda.w8_rows" or rows <= 16:
        assert torch.equal(wide.half(), run(x))
        want = linear_reference(x, weights)
        assert (wide - want).abs().max() < 5e-4 * want.abs().max()
    else:
        assert torch.equal(wide, run(x).float())
