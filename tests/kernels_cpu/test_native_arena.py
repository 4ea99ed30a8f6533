"""Where re-laid weights lie: aligned, apart, and kept as long as somebody reads them."""

from __future__ import annotations

import gc
import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.native.arena import ALIGNMENT, TAIL_BYTES, Arena


@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=12))
def test_pieces_are_whole_aligned_and_apart(sizes: list[int]) -> None:
    """Also those larger than a chunk."""
    arena = Arena(TAIL_BYTES + 16_384)
    data = [torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate(sizes)]
    pieces = [arena.place(part) for part in data]
    assert all(torch.equal(a, b) for a, b in zip(pieces, data, strict=True))
    spans = sorted((p.data_ptr(), p.data_ptr() + p.numel()) for p in pieces if p.numel())
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_piece_outlives_its_arena() -> None:
    arena = Arena(1 << 16)
    piece = arena.place(torch.arange(200, dtype=torch.uint8).view(10, 20))
    arena.place(torch.zeros(1 << 16, dtype=torch.uint8))
    del arena
    gc.collect()
    assert piece.flatten().tolist() == list(range(200))
