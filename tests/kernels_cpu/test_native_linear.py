"""The compiled linear against its own error bound, and what it promises beyond it: a row does not
depend on its neighbours or on threads, and no broken number is hidden."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.linear import cpu_native
from kernels.linear.cpu_native import CpuNative
from kernels.linear.op import LinearPolicy, explain_linear, prepare_linear
from kernels.linear.reference import linear_reference
from kernels.linear.weights import linear_key
from kernels.native.layout import NativeLinear
from kernels.native.library import NativeLibrary, native_library
from kernels.pack.dequantise import dequantise
from kernels.pack.packed_linear import PackedLinear
from tests.kernels_cpu.layers import random_layer

CPU = torch.device("cpu")
CODE_MAX = 32767


@pytest.fixture(scope="module", autouse=True)
def library() -> NativeLibrary:
    """This machine's own build: the project's tests need a C++ compiler."""
    found = native_library()
    assert isinstance(found, NativeLibrary), found
    return found


def native(layer: PackedLinear) -> NativeLinear:
    """The layer, prepared."""
    run = CpuNative().prepare(layer, torch.float32)
    assert isinstance(run, NativeLinear)
    return run


def rows(m: int, k: int, seed: int = 1) -> torch.Tensor:
    """Activations whose sizes differ a thousandfold between columns."""
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(m, k, generator=draw)
        * torch.logspace(-2, 1, k)[torch.randperm(k, generator=draw)]
    )


def bound(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Largest error of y by the kernel's rules: half a step of x in each block of 32 stored
    columns, and fp32 sums.
    """
    weight = dequantise(layer).abs()
    order = torch.arange(layer.in_features) if layer.perm is None else layer.perm.long()
    short = -layer.in_features % 32
    stored_x = torch.nn.functional.pad(x[:, order].abs(), (0, short)).view(len(x), -1, 32)
    stored_w = torch.nn.functional.pad(weight[:, order], (0, short))
    step = stored_x.amax(-1) / CODE_MAX
    by_block = stored_w.view(len(weight), -1, 32).sum(-1)
    rounding = 0.5 * step @ by_block.T
    # Unsigned codes are sums of larger terms than the weights: 16 steps at most.
    scale = layer.scales.float().abs().amax(1) * (32 if layer.bits < 8 else 256) + weight.amax(1)
    sums = x.abs().sum(1, keepdim=True) * scale * 2.0**-23 * math.sqrt(layer.in_features)
    return rounding + sums + 1e-6


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    k=st.sampled_from([1, 31, 32, 33, 64, 100, 160, 576]),
    bits=st.sampled_from([3, 4, 8]),
    group=st.sampled_from([32, 64, 128, -1]),
    kind=st.sampled_from(["symmetric", "offsets", "zeros"]),
    bias=st.booleans(),
    perm=st.booleans(),
    m=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_error_is_within_the_analytic_bound(
    n: int, k: int, bits: int, group: int, kind: str, bias: bool, perm: bool, m: int, seed: int
) -> None:
    """Any shape, group, kind; ragged N and K."""
    layer = random_layer(n, k, bits, group, kind, bias, perm, seed)
    assert CpuNative().refuse(linear_key(layer, torch.float32, CPU, exact=False)) is None
    x = rows(m, k, seed)
    error = (native(layer)(x) - linear_reference(x, layer)).abs()
    assert bool((error <= bound(x, layer)).all()), float((error / bound(x, layer)).max())


def test_rows_of_integers_come_out_exact() -> None:
    """One-hot rows return the weights themselves, to the rounding of fp32."""
    layer = random_layer(24, 64, kind="symmetric")
    got = native(layer)(torch.eye(64)).T
    assert torch.allclose(got, dequantise(layer), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_bits_in_any_batch_and_with_any_threads(bits: int, threads: int) -> None:
    """Tiles of four, two and one row share their arithmetic; threads divide features only."""
    layer, x = random_layer(200, 288, bits), rows(15, 288)
    run = native(layer)
    alone = torch.cat([run(x[i : i + 1]) for i in range(len(x))])
    torch.set_num_threads(threads)
    try:
        for m in range(1, 16):
            assert torch.equal(run(x[:m]), alone[:m])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_number_spoils_its_row_only(broken: float) -> None:
    """An integer cannot say NaN; the block's scale does."""
    layer, x = random_layer(16, 96), rows(3, 96)
    good = native(layer)(x)
    x[1, 40] = broken
    got = native(layer)(x)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[0], good[0])
    assert torch.equal(got[2], good[2])


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1e20])
def test_very_small_and_very_large_rows(size: float) -> None:
    """No overflow on the way; what is below 1e-30 counts as zero."""
    layer = random_layer(16, 64, kind="zeros")
    x = rows(2, 64) * size
    want = linear_reference(x, layer)
    assert float((native(layer)(x) - want).abs().max()) <= max(
        1e-28, float(want.abs().max()) * 1e-3
    )


def test_other_float_types_and_strides() -> None:
    """Any float dtype, any layout of rows."""
    layer, x = random_layer(16, 64), rows(4, 128)
    run = native(layer)
    assert torch.equal(run(x[:, ::2]), run(x[:, ::2].contiguous()))
    assert torch.equal(run(x[:, :64].bfloat16()), run(x[:, :64].bfloat16().float()))


def test_an_offset_beyond_fp16_is_refused() -> None:
    """It would become infinite in silence."""
    layer = random_layer(8, 32)
    wide = torch.full_like(layer.scales.float(), 1e5)
    broken = PackedLinear(4, 32, 32, layer.qweight, layer.scales, wide)
    with pytest.raises(ValueError, match="larger than fp16 can hold"):
        CpuNative().prepare(broken, torch.float32)


def test_the_minimum_of_an_imported_block_is_kept_exactly() -> None:
    """A Q4_1 block is d * u + m with f16 d and m; its offset m + 8 d may be no f16 number."""
    layer = random_layer(24, 64, kind="offsets", seed=3)
    assert layer.offsets is not None
    wide = layer.offsets.float() * 4 + 8 * layer.scales.float()
    imported = PackedLinear(4, 32, 64, layer.qweight, layer.scales, wide)
    assert float((wide.half().float() - wide).abs().max()) > 0
    assert torch.allclose(native(imported)(torch.eye(64)).T, dequantise(imported), atol=2e-6)


def test_refusals() -> None:
    """Each with its reason."""
    way = CpuNative()

    def reason(layer: PackedLinear, exact: bool = False, device: str = "cpu") -> str:
        key = linear_key(layer, torch.float32, torch.device(device), exact)
        return way.refuse(key) or ""

    assert "rounds activations" in reason(random_layer(8, 32), exact=True)
    assert "CPU only" in reason(random_layer(8, 32), device="cuda")
    assert (
        reason(random_layer(8, 96, group=48)) == "a group of 48 is not made of whole blocks of 32"
    )


def test_policy_decides_and_the_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On by policy, off by policy, and off for want of a library: torch's kernel then runs."""
    layer, on = random_layer(32, 64), LinearPolicy(CPU, torch.float32, native=True)
    off = LinearPolicy(CPU, torch.float32)

    def told(policy: LinearPolicy) -> str | None:
        return {v.backend: v.refusal for v in explain_linear(layer, policy)}["cpu.native"]

    assert isinstance(prepare_linear(layer, on).packed, NativeLinear)
    assert told(on) is None
    assert prepare_linear(layer, off)(rows(1, 64)).dtype == torch.bfloat16
    assert told(off) == "switched off"
    monkeypatch.setattr(cpu_native, "why_not_native", lambda: "no C++ compiler")
    assert prepare_linear(layer, on)(rows(1, 64)).dtype == torch.bfloat16
    assert told(on) == "no C++ compiler"


def test_a_layer_that_meets_no_prompt_needs_no_dense_copy() -> None:
    """The head: few rows only."""
    layer = random_layer(32, 64, 8)
    from kernels.linear.dense import Dense

    policy = LinearPolicy(CPU, torch.float32, dense=Dense(), native=True)
    assert prepare_linear(layer, policy).dense is not None
    alone = LinearPolicy(CPU, torch.float32, dense=Dense(), native=True, meets_prompts=False)
    assert prepare_linear(layer, alone).dense is None
