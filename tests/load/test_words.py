"""Codes inside 32-bit words: any width, and golden bytes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.load.formats.words import signed_bytes, unpack_padded, unpack_stream
from tests.load.foreign import (
    bit_stream,
    whole_codes,
)


@given(
    bits=st.sampled_from([3, 4, 8]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**31),
)
def test_words_of_any_width(bits: int, rows: int, columns: int, seed: int) -> None:
    """Odd counts too: bits behind the last code are zero in our bytes, whatever the file has."""
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns))
    # As GPTQ has them, the other way around: of a single word torch forgets which way that is.
    words = (
        torch.from_numpy(bit_stream(codes, bits)).T.clone(memory_format=torch.contiguous_format).T
    )
    assert np.array_equal(unpack_stream(words, bits, columns).numpy(), codes)
    padded = torch.from_numpy(whole_codes(codes, bits).copy())
    assert np.array_equal(unpack_padded(padded, bits, columns).numpy(), codes)
    signed = (codes ^ (1 << (bits - 1))).astype(np.uint8)
    expected = bit_stream(signed, bits).view(np.uint8)[:, : -(-columns * bits // 8)]
    assert np.array_equal(signed_bytes(words, bits, columns).numpy(), expected)


def test_golden_bytes() -> None:
    """By hand. W4 (7, -1) is unsigned 15, 7: word 0x7F, our byte F7. W3 [0, 1, 2, 3, -4, -3, -2,
    -1] is unsigned 4 5 6 7 0 1 2 3, 0x688FAC little-endian; our bytes 88 C6 FA.
    """
    four = torch.tensor([[0x7F]], dtype=torch.int32)
    assert signed_bytes(four, 4, 2).tolist() == [[0xF7]]
    three = torch.tensor([[0x688FAC]], dtype=torch.int32)
    assert signed_bytes(three, 3, 8).tolist() == [[0x88, 0xC6, 0xFA]]
    assert unpack_stream(three, 3, 8).tolist() == [[4, 5, 6, 7, 0, 1, 2, 3]]
