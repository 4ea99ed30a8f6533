"""A plan's ints become tensors: right ids, positions, slots and tables, with few tensor calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.core.plan import DecodeSlot, PrefillChunk
from engine_actor.work.inputs import build_decode, build_mixed, build_prefill

CPU = torch.device("cpu")


def test_decode_inputs_of_two_sequences() -> None:
    slots = [
        DecodeSlot(("c", 1), position=5, token=70, blocks=(9, 2), slot=0),
        DecodeSlot(("c", 2), position=0, token=71, blocks=(4,), slot=1),
    ]
    inputs = build_decode(slots, 4, CPU)
    assert inputs.ids.tolist() == [70, 71]
    assert inputs.positions.tolist() == [5, 0]
    assert inputs.slots.tolist() == [2 * 4 + 1, 4 * 4]
    assert inputs.block_tables.tolist() == [[9, 2], [4, 0]]
    assert inputs.logit_rows.tolist() == [0, 1]
    assert (inputs.q_lens, inputs.kv_lens) == ((1, 1), (6, 1))
    assert inputs.block_lists == ((9, 2), (4,))
    assert inputs.n_tokens == 2
    assert inputs.ids.dtype == inputs.positions.dtype == inputs.slots.dtype == torch.int64
    assert inputs.block_tables.dtype == torch.int32


def test_prefill_inputs_of_two_chunks_sample_only_where_asked() -> None:
    chunks = [
        PrefillChunk(("c", 1), 3, 6, (10, 11, 12), blocks=(7, 5), samples=False),
        PrefillChunk(("c", 2), 0, 2, (20, 21), blocks=(1,), samples=True),
    ]
    inputs = build_prefill(chunks, 4, CPU)
    assert inputs.ids.tolist() == [10, 11, 12, 20, 21]
    assert inputs.positions.tolist() == [3, 4, 5, 0, 1]
    assert inputs.slots.tolist() == [7 * 4 + 3, 5 * 4, 5 * 4 + 1, 4, 5]
    assert inputs.logit_rows.tolist() == [4]
    assert (inputs.q_lens, inputs.kv_lens) == ((3, 2), (6, 2))


def test_mixed_inputs_are_the_decoded_rows_and_then_the_chunks() -> None:
    slots = [
        DecodeSlot(("c", 1), position=5, token=70, blocks=(9, 2), slot=0),
        DecodeSlot(("c", 2), position=0, token=71, blocks=(4,), slot=1),
    ]
    chunks = [
        PrefillChunk(("c", 3), 3, 6, (10, 11, 12), blocks=(7, 5), samples=False),
        PrefillChunk(("c", 4), 0, 2, (20, 21), blocks=(1, 3, 8), samples=True),
    ]
    mixed = build_mixed(slots, chunks, 4, CPU)
    parts = build_decode(slots, 4, CPU), build_prefill(chunks, 4, CPU)
    for name in ("ids", "positions", "slots"):
        both = [number for part in parts for number in getattr(part, name).tolist()]
        assert getattr(mixed, name).tolist() == both
    for name in ("q_lens", "kv_lens", "block_lists"):
        assert getattr(mixed, name) == getattr(parts[0], name) + getattr(parts[1], name)
    assert mixed.logit_rows.tolist() == [0, 1, 2 + 4]
    assert mixed.block_tables.tolist() == [[9, 2, 0], [4, 0, 0], [7, 5, 0], [1, 3, 8]]
    assert mixed.n_tokens == 7


@given(
    block_tokens=st.integers(1, 20),
    start=st.integers(0, 60),
    length=st.integers(1, 60),
    seed=st.randoms(use_true_random=False),
)
def test_slots_are_block_times_size_plus_offset(
    block_tokens: int, start: int, length: int, seed: object
) -> None:
    end = start + length
    blocks = list(range(-(-end // block_tokens)))
    seed.shuffle(blocks)  # type: ignore[attr-defined]
    chunk = PrefillChunk(("c", 1), start, end, tuple(range(length)), tuple(blocks), True)
    expected = [
        blocks[position // block_tokens] * block_tokens + position % block_tokens
        for position in range(start, end)
    ]
    assert build_prefill([chunk], block_tokens, CPU).slots.tolist() == expected


def test_a_token_in_flight_cannot_be_built_without_its_buffer() -> None:
    slot = DecodeSlot(("c", 1), position=5, token=None, blocks=(0, 1), slot=0)
    with pytest.raises(ValueError, match="token of position 5 is still in flight"):
        build_decode([slot], 4, CPU)


def test_a_chunk_whose_ids_do_not_fit_is_our_bug() -> None:
    chunk = PrefillChunk(("c", 1), 0, 3, (1, 2), (0,), True)
    with pytest.raises(ValueError, match=r"2 ids for 0\.\.3"):
        build_prefill([chunk], 4, CPU)
