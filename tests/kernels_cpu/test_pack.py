"""The bytes of packed codes, typed by hand, and what they mean in fp32 (S-09, S-11, S-25, S-26)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.pack.dequantise import dequantise, gather_rows, pack_codes, slice_rows, unpack_codes
from kernels.pack.packed_linear import PackedLinear
from kernels.pack.w3 import pack_w3, unpack_w3
from kernels.pack.w4 import pack_w4, unpack_w4
from kernels.pack.w8 import pack_w8, unpack_w8
from tests.kernels_cpu.layers import random_layer

RANGES = {3: (-4, 3), 4: (-8, 7), 8: (-128, 127)}


def test_w4_golden_bytes() -> None:
    """Even column in the low half; two's complement."""
    packed = pack_w4(torch.tensor([[7, -1, -8, 3]]))
    assert packed.tolist() == [[0xF7, 0x38]]
    assert unpack_w4(torch.tensor([[0xF7, 0x38]], dtype=torch.uint8), 4).tolist() == [
        [7, -1, -8, 3]
    ]


def test_w3_golden_bytes() -> None:
    """Eight codes in three bytes, a little-endian bit stream."""
    codes = [[0, 1, 2, 3, -4, -3, -2, -1]]
    assert pack_w3(torch.tensor(codes)).tolist() == [[0x88, 0xC6, 0xFA]]
    assert unpack_w3(torch.tensor([[0x88, 0xC6, 0xFA]], dtype=torch.uint8), 8).tolist() == codes


def test_w8_golden_bytes() -> None:
    """A byte is a code."""
    assert pack_w8(torch.tensor([[-128, -1, 0, 127]])).tolist() == [[0x80, 0xFF, 0x00, 0x7F]]


def test_w3_every_word() -> None:
    """All 2^24 three-byte words come back from their codes, and every code follows the formula."""
    for first in range(0, 1 << 24, 1 << 21):
        words = torch.arange(first, first + (1 << 21), dtype=torch.int32).unsqueeze(1)
        packed = torch.cat([(words >> shift) & 0xFF for shift in (0, 8, 16)], 1).to(torch.uint8)
        codes = unpack_w3(packed, 8)
        assert torch.equal(pack_w3(codes), packed)
        column = (first >> 21) % 8
        raw = (words[:, 0] >> (3 * column)) & 7
        assert torch.equal(codes[:, column].int(), torch.where(raw >= 4, raw - 8, raw))


def test_w4_every_byte() -> None:
    """All 256 bytes come back."""
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).unsqueeze(1)
    assert torch.equal(pack_w4(unpack_w4(packed, 2)), packed)


@given(bits=st.sampled_from([3, 4, 8]), k=st.integers(1, 37), seed=st.integers(0, 99))
def test_pack_then_unpack_is_identity(bits: int, k: int, seed: int) -> None:
    """Any number of columns, also those that end inside a byte."""
    low, high = RANGES[bits]
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(low, high + 1, (3, k), generator=draw)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, -(-k * bits // 8))
    unpack = {3: unpack_w3, 4: unpack_w4, 8: unpack_w8}[bits]
    assert torch.equal(unpack(packed, k).long(), codes)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_codes_out_of_range_are_refused(bits: int) -> None:
    """Never a silent wrap."""
    low, high = RANGES[bits]
    for bad in (low - 1, high + 1):
        with pytest.raises(ValueError, match=f"codes must be in {low}..{high}"):
            pack_codes(torch.tensor([[0, bad]]), bits)


def test_dequantise_by_hand() -> None:
    """Symmetric, offsets, zeros, with a short last group: K = 5 in groups of 4."""
    codes = torch.tensor([[1, -2, 7, -8, 3]])
    packed = pack_w4(codes)
    scales = torch.tensor([[0.5, -2.0]], dtype=torch.float16)
    plain = PackedLinear(4, 4, 5, packed, scales)
    assert dequantise(plain).tolist() == [[0.5, -1.0, 3.5, -4.0, -6.0]]
    offsets = torch.tensor([[0.25, 1.0]], dtype=torch.float16)
    assert dequantise(PackedLinear(4, 4, 5, packed, scales, offsets)).tolist() == [
        [0.75, -0.75, 3.75, -3.75, -5.0]
    ]
    zeros = torch.tensor([[-1, 2]], dtype=torch.int8)
    assert dequantise(PackedLinear(4, 4, 5, packed, scales, zeros=zeros)).tolist() == [
        [1.0, -0.5, 4.0, -3.5, -2.0]
    ]


@pytest.mark.parametrize("group", [-1, 3, 4, 2**40])
def test_whole_row_group(group: int) -> None:
    """One scale a row; a checkpoint may say so by a number that no memory would hold."""
    codes, scales = pack_w8(torch.tensor([[1, 2, 3]])), torch.tensor([[2.0]]).half()
    layer = PackedLinear(8, group, 3, codes, scales)
    assert layer.group_size == 3
    assert dequantise(layer).tolist() == [[2.0, 4.0, 6.0]]


def test_perm_restores_the_order_of_x() -> None:
    """Column k of the codes multiplies x[perm[k]]."""
    layer = PackedLinear(
        4,
        -1,
        3,
        pack_w4(torch.tensor([[1, 2, 3]])),
        torch.tensor([[1.0]]).half(),
        perm=torch.tensor([2, 0, 1], dtype=torch.int32),
    )
    assert dequantise(layer).tolist() == [[2.0, 3.0, 1.0]]


@pytest.mark.parametrize("kind", ["symmetric", "offsets", "zeros"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rows_alone_equal_rows_of_the_whole(bits: int, kind: str) -> None:
    """gather_rows (an embedding lookup) and slice_rows give the bits of the full matrix."""
    layer = random_layer(12, 40, bits, 16, kind)
    whole = dequantise(layer)
    ids = torch.tensor([11, 0, 0, 5])
    assert torch.equal(gather_rows(layer, ids), whole[ids])
    assert torch.equal(dequantise(slice_rows(layer, 3, 9)), whole[3:9])
    assert torch.equal(unpack_codes(slice_rows(layer, 0, 4)), unpack_codes(layer)[:4])
