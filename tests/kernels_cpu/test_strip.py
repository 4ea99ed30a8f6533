"""The strip layout against the packers: every code where the layout's definition puts it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.linear.strip import (
    STEP_COLUMNS,
    StripWeights,
    from_strips,
    interleave_halves,
    refuse_strips,
    strip_bytes,
    to_strips,
)
from kernels.pack.dequantise import dequantise, dequantise_stored, unpack_codes
from kernels.pack.packed_linear import PackedLinear
from tests.kernels_cpu.layers import random_layer


def codes_by_definition(weights: StripWeights) -> torch.Tensor:
    """Codes i64 [N, K]: for each element the word and the bits its place (n, k) leads to.

    Written from the definition, one index at a time; shares nothing with from_strips().
    """
    n = torch.arange(weights.out_features)[:, None]
    k = torch.arange(weights.in_features)[None, :]
    strip, g, h = n // 16, n % 8, n % 16 // 8
    block, t, j, c, element = k // 64, k % 64 // 16, k % 16 // 4, k % 4 // 2, k % 2
    lane = 4 * g + t
    pair = 4 * j + 2 * c + h
    words = weights.words.long() & 0xFFFFFFFF
    if weights.bits == 4:
        word = words[strip, block, lane, j]
        return (word >> (4 * (pair % 4) + 16 * element) & 0xF) - 8
    quarter, of_quarter = block // 4, block % 4
    plane = torch.clamp(pair // 5, max=2)
    five = words[strip, quarter, plane, lane, of_quarter] >> (3 * (pair % 5) + 16 * element) & 7
    spare = sum(
        (words[strip, quarter, p, lane, of_quarter] >> (15 + 16 * element) & 1) << p
        for p in range(3)
    )
    return torch.where(pair == 15, spare, five) - 4


def matrix_by_definition(weights: StripWeights) -> torch.Tensor:
    """fp32 [N, K] as a kernel means it: s q + o."""
    n = torch.arange(weights.out_features)[:, None]
    group = torch.arange(weights.in_features)[None, :] // weights.group
    matrix = codes_by_definition(weights) * weights.scales[n // 16, group, n % 16].float()
    if weights.offsets is not None:
        matrix += weights.offsets[n // 16, group, n % 16].float()
    return matrix


LAYERS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 40),
        "k": st.integers(1, 600),
        "bits": st.sampled_from((3, 4)),
        "group": st.sampled_from((32, 64, 128, -1)),
        "kind": st.sampled_from(("symmetric", "offsets", "zeros")),
        "bias": st.booleans(),
        "perm": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
)


@settings(deadline=None)
@given(shape=LAYERS)
def test_every_code_scale_and_offset_is_where_the_layout_says(shape: dict) -> None:
    """Ragged N and K, all groups, both signs of scales; the padding is zero."""
    layer = random_layer(**shape)
    weights = to_strips(layer)
    codes = unpack_codes(layer)
    assert torch.equal(codes_by_definition(weights), codes.long())
    padded = from_strips(weights)
    assert torch.equal(padded[: layer.out_features, : layer.in_features], codes)
    assert not padded[layer.out_features :].any()
    assert not padded[:, layer.in_features :].any()
    want = dequantise_stored(layer)
    # A folded zero is rounded once to fp16; everything else is the same product in fp32.
    exact = shape["kind"] != "zeros"
    torch.testing.assert_close(
        matrix_by_definition(weights), want, rtol=0, atol=0 if exact else 2e-3
    )


def test_whole_rows_and_groups_of_whole_steps() -> None:
    """Group -1 spans the padded row; 256 and 512 are two and four steps of W4."""
    whole = to_strips(random_layer(16, 300, group=-1))
    assert (whole.group, whole.steps, tuple(whole.scales.shape)) == (384, 3, (1, 1, 16))
    for group in (256, 512):
        layer = random_layer(16, 1024, group=group)
        weights = to_strips(layer)
        assert weights.group == group
        assert torch.equal(matrix_by_definition(weights), dequantise_stored(layer))


def test_act_order_is_a_gather_of_columns() -> None:
    """Column k of the strips multiplies x[perm[k]]."""
    layer = random_layer(16, 128, perm=True)
    weights = to_strips(layer)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    assert weights.perm is not None
    gathered = x[:, weights.perm] @ matrix_by_definition(weights).T
    torch.testing.assert_close(gathered, x @ dequantise(layer).T)


@pytest.mark.parametrize("bits", [3, 4])
def test_bytes_read_are_the_bits_of_the_codes(bits: int) -> None:
    """No byte of padding where N and K are whole."""
    columns = 2 * STEP_COLUMNS[bits]
    weights = to_strips(random_layer(32, columns, bits=bits, group=128, kind="symmetric"))
    assert weights.words.numel() * 4 == 32 * columns * bits // 8
    assert weights.nbytes == 32 * columns * bits // 8 + 32 * columns // 128 * 2


@pytest.mark.parametrize(
    ("bits", "group", "k", "reason"),
    [
        (4, 128, 2048, None),
        (4, 2048, 2048, None),
        (4, 48, 2048, "group 48 is none of"),
        (3, 384, 2048, "no multiple of 256"),
        (4, 384, 2048, None),
        (8, 128, 2048, "holds 3 or 4 bits, not 8"),
        (0, 0, 2048, "not dense weights"),
    ],
)
def test_refusals_say_why(bits: int, group: int, k: int, reason: str | None) -> None:
    """The number that does not fit is in the reason."""
    found = refuse_strips(bits, group, k)
    assert found is None if reason is None else reason in (found or "")


def test_to_strips_raises_what_it_cannot_hold() -> None:
    """A group without a layout, and a zero point that overflows fp16 once it is folded."""
    with pytest.raises(ValueError, match="group 48"):
        to_strips(random_layer(16, 96, group=48))
    layer = random_layer(16, 128, group=128, kind="zeros")
    large = PackedLinear(
        4, 128, 128, layer.qweight, layer.scales * 0 + 60000, zeros=layer.zeros * 0 + 7
    )
    with pytest.raises(ValueError, match="does not fit fp16"):
        to_strips(large)


def test_gate_and_up_share_strips() -> None:
    """Row g of a strip is a gate, row g + 8 its up."""
    layer = random_layer(64, 128, bias=True)
    mixed = interleave_halves(layer)
    rows = dequantise_stored(mixed).view(4, 2, 8, 128)
    whole = dequantise_stored(layer)
    assert torch.equal(rows[:, 0].reshape(32, 128), whole[:32])
    assert torch.equal(rows[:, 1].reshape(32, 128), whole[32:])
    assert mixed.bias is not None
    assert layer.bias is not None
    assert torch.equal(mixed.bias.view(4, 2, 8)[:, 1].flatten(), layer.bias[32:])
    with pytest.raises(ValueError, match="not a multiple of 16"):
        interleave_halves(random_layer(24, 128))


@pytest.mark.parametrize("bits", [3, 4])
def test_a_layer_re_laid_in_parts_is_the_layer(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two and a half parts: a card that is nearly full has no room for the scratch of a whole."""
    layer = random_layer(n=80, k=300, bits=bits, group=64)
    whole = to_strips(layer)
    monkeypatch.setattr("kernels.linear.strip._CODES_AT_ONCE", 32 * whole.padded_columns)
    assert torch.equal(to_strips(layer).words, whole.words)
    assert torch.equal(codes_by_definition(whole), unpack_codes(layer).long())


@given(LAYERS)
@settings(max_examples=40, deadline=None)
def test_bytes_are_known_before_anything_is_re_laid(spec: dict[str, object]) -> None:
    layer = random_layer(**spec)  # type: ignore[arg-type]
    weights = to_strips(layer)
    words, scales = strip_bytes(layer.bits, layer.group_size, layer.out_features, layer.in_features)
    assert words == weights.words.numel() * 4
    assert scales == weights.scales.numel() * 2
    assert weights.nbytes == words + scales * (1 if weights.offsets is None else 2)
