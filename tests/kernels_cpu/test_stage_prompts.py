"""What a captured forward of prompts reads, from a batch's own ints."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kernels.kv.stage_prompts import SEQUENCES, StagedPrompts, stage_prompts

BLOCK, HEAD_DIM = 4, 8
CPU = torch.device("cpu")
POSITIONS = 100
ROTARY = (
    torch.arange(POSITIONS * HEAD_DIM, dtype=torch.float32).view(POSITIONS, HEAD_DIM),
    -torch.arange(POSITIONS * HEAD_DIM, dtype=torch.float32).view(POSITIONS, HEAD_DIM),
)


def stage(
    to: StagedPrompts, q_lens: Sequence[int], kv_lens: Sequence[int], lists: Sequence[list[int]]
) -> None:
    """ids are 10, 11, ...; each prompt's rows are its last positions."""
    spans = [range(k - q, k) for q, k in zip(q_lens, kv_lens, strict=True)]
    positions = torch.tensor([p for span in spans for p in span])
    slots = torch.tensor(
        [
            blocks[p // BLOCK] * BLOCK + p % BLOCK
            for span, blocks in zip(spans, lists, strict=True)
            for p in span
        ]
    )
    width = max(map(len, lists))
    tables = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in lists])
    ids = torch.arange(10, 10 + len(positions))
    stage_prompts(to, ids, positions, slots, tables.int(), (q_lens, kv_lens), BLOCK, ROTARY)


def test_a_batch_and_its_padding() -> None:
    to = StagedPrompts.empty(8, 20, BLOCK, HEAD_DIM, CPU)
    stage(to, [3, 1], [5, 6], [[7, 2], [4, 9]])
    assert to.ids.tolist() == [10, 11, 12, 13, 0, 0, 0, 0]
    assert to.slots.tolist() == [30, 31, 8, 37, -1, -1, -1, -1]
    assert to.cos[:, 0, 0].tolist() == [16.0, 24.0, 32.0, 40.0, 0.0, 0.0, 0.0, 0.0]
    assert to.sin[:, 0, 1].tolist() == [-17.0, -25.0, -33.0, -41.0, -1.0, -1.0, -1.0, -1.0]
    assert to.key_slots.tolist() == [28, 29, 30, 31, 8, 16, 17, 18, 19, 36, 37, *[0] * 9]
    assert to.q_starts.tolist() == [0, 3, 4, 4, 4, 4, 4, 4, 4, 8]
    assert to.k_starts.tolist() == [0, 5, 11, 11, 11, 11, 11, 11, 11, 11]
    assert to.last_rows.tolist() == [2, 3, 0, 0, 0, 0, 0, 0]
    assert to.lengths.tolist() == [5, 6, 0, 0, 0, 0, 0, 0]
    assert to.tables[:2, :2].tolist() == [[7, 2], [4, 9]]


def test_nothing_of_a_larger_batch_is_left() -> None:
    to = StagedPrompts.empty(8, 20, BLOCK, HEAD_DIM, CPU)
    stage(to, [2, 2, 4], [2, 9, 4], [[1], [3, 4, 5], [6]])
    stage(to, [1], [3], [[2]])
    fresh = StagedPrompts.empty(8, 20, BLOCK, HEAD_DIM, CPU)
    stage(fresh, [1], [3], [[2]])
    for name in ("ids", "slots", "cos", "key_slots", "q_starts", "k_starts", "last_rows"):
        assert torch.equal(getattr(to, name), getattr(fresh, name)), name
    assert torch.equal(to.lengths, fresh.lengths), "entries of tables behind it are read by nobody"


def test_every_place_taken() -> None:
    to = StagedPrompts.empty(SEQUENCES, 2 * SEQUENCES, BLOCK, HEAD_DIM, CPU)
    stage(to, [1] * SEQUENCES, [2] * SEQUENCES, [[i] for i in range(SEQUENCES)])
    assert to.q_starts.tolist() == [*range(SEQUENCES + 1), SEQUENCES]
    assert to.k_starts.tolist() == [*range(0, 2 * SEQUENCES + 1, 2), 2 * SEQUENCES]
    assert to.last_rows.tolist() == list(range(SEQUENCES))


@pytest.mark.parametrize("is_cleared", [True, False])
def test_without_prompts_all_rows_are_padding(is_cleared: bool) -> None:
    whole = StagedPrompts.empty(8, 20, BLOCK, HEAD_DIM, CPU)
    to = whole.first(4, 12, BLOCK)
    if is_cleared:
        stage(to, [3], [9], [[2, 5, 1]])
        to.clear()
        assert to.q_starts.tolist() == [*[0] * (SEQUENCES + 1), 4]
    assert to.slots.tolist() == [-1] * 4
    assert not to.k_starts.any()
    assert not to.lengths.any()
    assert to.tables.shape == (SEQUENCES, 3)
