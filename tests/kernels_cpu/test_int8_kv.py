"""INT8 keys and values: what a code and a scale mean, written and read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.op import attention_reference, plan_attention
from kernels.kv.op import plan_write, write_kv, write_kv_reference
from kernels.pack.int8_kv import Int8KV, dequantise_kv, empty_int8_kv, quantise_kv

CPU = torch.device("cpu")


@given(
    seed=st.integers(0, 50),
    head_dim=st.sampled_from([1, 8, 64]),
    size=st.sampled_from([0.05, 1.0, 300.0]),
)
def test_a_value_is_within_half_a_step(seed: int, head_dim: int, size: float) -> None:
    """Half a step of the largest magnitude / 127, and a little for the rounding of the scale."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(5, 2, head_dim, generator=draw) * size
    codes, scales = quantise_kv(values)
    assert codes.dtype == torch.int8
    assert scales.dtype == torch.float16
    assert scales.shape == values.shape[:-1]
    error = (dequantise_kv(codes, scales) - values).abs()
    step = values.abs().amax(-1, keepdim=True) / 127
    assert (error <= 0.57 * step + 1e-7).all()


def test_zeros_and_what_is_too_small_for_a_scale_become_zero() -> None:
    values = torch.tensor([[0.0, 0.0], [1e-9, -1e-9], [127.0, -63.5]])
    codes, scales = quantise_kv(values)
    assert scales.tolist() == [0, 0, 1]
    assert codes.tolist() == [[0, 0], [0, 0], [127, -64]]


def test_the_scales_have_the_codes_shape() -> None:
    with pytest.raises(ValueError, match=r"scales must be \(1, 4, 3, 2\), got \(1, 4, 2, 3\)"):
        Int8KV(torch.zeros(1, 4, 2, 3, 8, dtype=torch.int8), torch.zeros(1, 4, 2, 3))


def test_bytes_of_a_cache() -> None:
    """130 bytes a head of 128 where fp16 takes 256."""
    cache = empty_int8_kv(3, 16, 2, 128, CPU)
    assert cache.nbytes == 3 * 16 * 2 * 2 * 130


@pytest.mark.parametrize("slots", [[0, 1, 2], [7, 3, 11]])
def test_written_tokens_are_found_again(slots: list[int]) -> None:
    """Only the named slots change; tokens() gives their values back."""
    new = torch.randn(3, 4, 8)
    got, want = empty_int8_kv(3, 4, 2, 8, CPU), empty_int8_kv(3, 4, 2, 8, CPU)
    write_kv(got, new, plan_write(torch.tensor(slots), slots))
    write_kv_reference(want, new, slots)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scales, want.scales)
    read = got.tokens(torch.tensor(slots, dtype=torch.int32), torch.float32).flatten(1, 2)
    assert (read - new).abs().max() < 0.6 * new.abs().max() / 127
    everything = got.tokens(slice(0, 12), torch.float32)
    assert torch.equal(everything[slots].flatten(1, 2), read)
    rest = [slot for slot in range(12) if slot not in slots]
    assert not everything[rest].any()


def test_attention_over_codes_is_attention_over_their_values() -> None:
    cache = empty_int8_kv(3, 4, 2, 8, CPU)
    slots = list(range(10))
    write_kv(cache, torch.randn(10, 4, 8), plan_write(torch.tensor(slots), slots))
    plan = plan_attention([2], [10], [[0, 1, 2]], 4, CPU)
    q, wide = torch.randn(2, 6, 8), cache.values()
    assert torch.equal(attention_reference(q, cache, plan), attention_reference(q, wide, plan))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_are_rounded_once(dtype: torch.dtype) -> None:
    """Every code times scales of all magnitudes, the smallest halves among them."""
    codes = torch.arange(-127, 128, dtype=torch.int8).repeat(200, 1)
    draw = torch.Generator().manual_seed(3)
    scales = (2.0 ** (torch.rand(200, generator=draw) * 38 - 24)).half()
    exact = (codes.double() * scales.double().unsqueeze(-1)).float().to(dtype)
    assert torch.equal(dequantise_kv(codes, scales, dtype), exact)
