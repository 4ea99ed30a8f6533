"""Row ops against their fp32 definitions; the exact set gives equal bits in any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.elementwise.exact import ExactRows
from kernels.elementwise.fast import FastRows
from kernels.elementwise.op import (
    HeadLayout,
    rms_norm_reference,
    rotation_reference,
    silu_mul_reference,
)

EPS = 1e-5
LAYOUT = HeadLayout(queries=1, kv=2, query_scale=0.3)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def angles(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin [rows, 1, dim] of random angles."""
    angle = draw(rows, 1, dim // 2, seed=5)
    return torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 50])
@pytest.mark.parametrize("way", [FastRows(), ExactRows()])
class TestEqualsDefinition:
    """Any number of rows."""

    def test_rms_norm(self, way: FastRows | ExactRows, rows: int) -> None:
        x, weight = draw(rows, 48) * 3, draw(48, seed=1)
        got = way.norm(weight, EPS)(x)
        torch.testing.assert_close(got, rms_norm_reference(x, weight, EPS), rtol=1e-5, atol=1e-6)

    def test_rms_norm_of_heads(self, way: FastRows | ExactRows, rows: int) -> None:
        x, weight = draw(rows, 3, 16), draw(16, seed=1)
        got = way.norm(weight, EPS)(x)
        torch.testing.assert_close(got, rms_norm_reference(x, weight, EPS), rtol=1e-5, atol=1e-6)

    def test_tiny_rows_lean_on_epsilon(self, way: FastRows | ExactRows, rows: int) -> None:
        x, weight = draw(rows, 48) * 1e-4, torch.ones(48)
        got = way.norm(weight, EPS)(x)
        torch.testing.assert_close(got, rms_norm_reference(x, weight, EPS), rtol=1e-5, atol=1e-8)
        assert torch.equal(way.norm(weight, EPS)(x * 0), x * 0)

    def test_rotate(self, way: FastRows | ExactRows, rows: int) -> None:
        heads, (cos, sin) = draw(rows, 5, 16), angles(rows, 16)
        got = way.rotation(cos, sin, LAYOUT)(heads)
        want = rotation_reference(heads, cos, sin, LAYOUT)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert torch.equal(got[:, 3:], heads[:, 3:])

    def test_silu_mul(self, way: FastRows | ExactRows, rows: int) -> None:
        x = draw(rows, 2 * 37)
        want = silu_mul_reference(x)
        torch.testing.assert_close(way.silu_mul(x.clone()), want, rtol=1e-5, atol=1e-6)


def test_rotate_widens_half_types() -> None:
    """bf16 heads under fp32 angles come out in fp32, values unchanged."""
    heads, (cos, sin) = draw(4, 5, 16).bfloat16(), angles(4, 16)
    got = FastRows().rotation(cos, sin, LAYOUT)(heads)
    assert got.dtype == torch.float32
    want = rotation_reference(heads, cos, sin, LAYOUT)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@given(
    rows=st.integers(1, 40),
    width=st.sampled_from([3, 16, 37, 80, 1536]),
    seed=st.integers(0, 30),
    cut=st.integers(0, 40),
)
def test_exact_rows_do_not_depend_on_their_batch(
    rows: int, width: int, seed: int, cut: int
) -> None:
    """Permuted and split: equal bits of every op, odd widths included."""
    way = ExactRows()
    x, weight = draw(rows, 2 * width, seed=seed), draw(2 * width, seed=1)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    for op in (way.norm(weight, EPS), way.silu_mul):
        whole = op(x)
        assert torch.equal(op(x[order]), whole[order])
        parts = [op(part) for part in (x[: cut % rows], x[cut % rows :]) if len(part)]
        assert torch.equal(torch.cat(parts), whole)
    heads, (cos, sin) = draw(rows, 5, 2 * width, seed=seed), angles(rows, 2 * width)
    whole = way.rotation(cos, sin, LAYOUT)(heads)
    shuffled = way.rotation(cos[order], sin[order], LAYOUT)(heads[order])
    assert torch.equal(shuffled, whole[order])
