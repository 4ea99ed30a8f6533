"""Rotation, scale and KV write in one kernel against the definitions; INT8 bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise.op import HeadLayout, rms_norm_reference, rotation_reference
from kernels.kv.cuda import CudaStore, HeadCounts
from kernels.kv.op import HeadNorms, plan_write, write_kv, write_kv_reference
from kernels.pack.int8_kv import Int8KV, dequantise_kv, empty_int8_kv, quantise_kv

pytestmark = pytest.mark.gpu

STORE = CudaStore()
DTYPES = {"float16": (torch.float16, 2e-3), "bfloat16": (torch.bfloat16, 1.6e-2)}
EPS = 1e-6
BLOCKS, BLOCK_TOKENS = 9, 16


def angles(rows: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin [rows, 1, head_dim] of random angles."""
    angle = torch.randn(rows, 1, head_dim // 2, device="cuda") * 10
    return torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)


def head_norms(head_dim: int) -> HeadNorms:
    weights = torch.rand(2, head_dim, device="cuda") + 0.5
    return HeadNorms(weights[0], weights[1], EPS)


def reference(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: HeadLayout,
    norms: HeadNorms | None,
) -> torch.Tensor:
    wide = heads.float()
    if norms is not None:
        q, k = layout.queries, layout.queries + layout.kv
        wide[:, :q] = rms_norm_reference(wide[:, :q], norms.q_weight, EPS)
        wide[:, q:k] = rms_norm_reference(wide[:, q:k], norms.k_weight, EPS)
    return rotation_reference(wide, cos, sin, layout)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "queries", "kv_heads"), [(128, 16, 2), (64, 9, 3), (96, 3, 3)]
)
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_store(
    rows: int, head_dim: int, queries: int, kv_heads: int, name: str, normed: bool
) -> None:
    """Queries come out rotated and scaled, the cache holds keys and values, and nothing else."""
    dtype, tolerance = DTYPES[name]
    layout = HeadLayout(queries, kv_heads, head_dim**-0.5)
    heads = torch.randn(rows, queries + 2 * kv_heads, head_dim, device="cuda").to(dtype)
    cos, sin = angles(rows, head_dim)
    norms = head_norms(head_dim) if normed else None
    slots = torch.randperm(BLOCKS * BLOCK_TOKENS)[:rows].cuda()
    kv = torch.full((BLOCKS, BLOCK_TOKENS, 2, kv_heads, head_dim), torch.nan, dtype=dtype).cuda()
    before = heads.clone()
    counts = HeadCounts(queries, kv_heads, layout.query_scale)
    q = STORE.prepare(cos, sin, slots, counts)(heads, kv, norms)
    want = reference(heads, cos, sin, layout, norms)
    assert torch.equal(heads, before)
    torch.testing.assert_close(q.float(), want[:, :queries], rtol=tolerance, atol=tolerance)
    stored = kv.view(-1, 2 * kv_heads, head_dim)
    torch.testing.assert_close(
        stored[slots].float(), want[:, queries:], rtol=tolerance, atol=tolerance
    )
    assert torch.equal(stored[slots, kv_heads:], heads[:, queries + kv_heads :])
    stored[slots] = torch.nan
    assert stored.isnan().all()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_int8_values_are_quantised_as_the_reference_does(head_dim: int, name: str) -> None:
    """Values pass through unrotated, so their codes and scales have the definition's bits; keys
    are within one rounding of it.
    """
    dtype, rows, queries, kv_heads = DTYPES[name][0], 20, 4, 2
    heads = torch.randn(rows, queries + 2 * kv_heads, head_dim, device="cuda").to(dtype)
    heads[3, -1] = 0
    heads[4, -1] *= 1e-7
    heads[5, -1] *= 100
    cos, sin = angles(rows, head_dim)
    slots = torch.randperm(BLOCKS * BLOCK_TOKENS)[:rows].cuda()
    kv = empty_int8_kv(BLOCKS, BLOCK_TOKENS, kv_heads, head_dim, torch.device("cuda"))
    kv.codes.fill_(55)
    counts = HeadCounts(queries, kv_heads, 0.1)
    STORE.prepare(cos, sin, slots, counts)(heads, kv, None)
    codes, scales = kv.codes.flatten(0, 1)[slots], kv.scales.flatten(0, 1)[slots].mT
    want_codes, want_scales = quantise_kv(heads[:, queries + kv_heads :])
    assert torch.equal(scales[:, 1], want_scales)
    assert torch.equal(codes[:, 1], want_codes)
    want = rotation_reference(heads, cos, sin, HeadLayout(queries, kv_heads, 0.1))
    got = dequantise_kv(codes[:, 0], scales[:, 0])
    step = scales[:, 0].float().unsqueeze(-1)
    assert ((got - want[:, queries : queries + kv_heads]).abs() <= 0.52 * step + 1e-6).all()
    untouched = torch.ones(BLOCKS * BLOCK_TOKENS, dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert (kv.codes.flatten(0, 1)[untouched.cuda()] == 55).all()


def test_rows_of_padding_write_nothing() -> None:
    """A graph's unused rows have slot -1."""
    heads = torch.randn(4, 8, 64, device="cuda").half()
    cos, sin = angles(4, 64)
    slots = torch.tensor([3, -1, 7, -1], device="cuda")
    for int8 in (False, True):
        kv = empty_int8_kv(2, BLOCK_TOKENS, 2, 64, torch.device("cuda"))
        cache = kv if int8 else torch.zeros(kv.codes.shape, dtype=torch.float16, device="cuda")
        q = STORE.prepare(cos, sin, slots, HeadCounts(4, 2, 1.0))(heads, cache, None)
        assert q.isfinite().all()
        held = cache.codes if isinstance(cache, Int8KV) else cache
        written = held.flatten(0, 1).flatten(1).ne(0).any(1).nonzero().flatten().tolist()
        assert written == [3, 7]


def test_torch_writes_an_int8_cache_too() -> None:
    """write_kv and the token by token reference agree on the device."""
    new, slots = torch.randn(3, 4, 64, device="cuda"), [5, 20, 11]
    got = empty_int8_kv(2, BLOCK_TOKENS, 2, 64, torch.device("cuda"))
    want = empty_int8_kv(2, BLOCK_TOKENS, 2, 64, torch.device("cuda"))
    write_kv(got, new, plan_write(torch.tensor(slots, device="cuda"), slots))
    write_kv_reference(want, new, slots)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scales, want.scales)
