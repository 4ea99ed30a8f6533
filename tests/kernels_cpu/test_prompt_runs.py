"""Which prompts share a call of flash attention on the GPU, and which slots it reads."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import cuda_prompt
from kernels.attention.cuda import plan_attention_cuda
from kernels.attention.cuda_prompt import PromptRun

BLOCK = 4


def runs(q_lens: list[int], kv_lens: list[int], window: int | None = None) -> list[PromptRun]:
    """Of sequences whose blocks are the even numbers, one sequence's behind another's."""
    lists, next_block = [], 0
    for kv_len in kv_lens:
        count = -(-kv_len // BLOCK)
        lists.append([2 * (next_block + place) for place in range(count)])
        next_block += count
    plan = plan_attention_cuda(q_lens, kv_lens, lists, BLOCK, torch.device("cpu"), window)
    return list(plan.prompts)


def test_fresh_prompts_share_a_call() -> None:
    (run,) = runs([5, 2, 9], [5, 2, 9])
    assert (run.first, run.last, run.longest, run.n_keys) == (0, 16, (9, 9), 16)
    assert run.starts is not None
    assert [starts.tolist() for starts in run.starts] == [[0, 5, 7, 16]] * 2
    assert run.slots is not None
    assert run.slots.tolist() == [
        0,
        1,
        2,
        3,
        8,
        16,
        17,
        *(24 + i for i in (*range(4), *range(8, 12))),
        40,
    ]


def test_decoded_rows_part_the_calls() -> None:
    found = runs([1, 5, 2, 1, 3], [8, 5, 2, 3, 3])
    assert [(run.first, run.last) for run in found] == [(1, 8), (9, 12)]
    assert [run.starts is None for run in found] == [False, True]


def test_long_contexts_go_one_by_one() -> None:
    """Beyond four keys a row the gathered copy could be what a step takes most memory for."""
    assert [run.last - run.first for run in runs([4, 4, 4], [16, 16, 16])] == [12]
    assert [run.last - run.first for run in runs([4, 4, 4], [17, 17, 15])] == [8, 4]
    assert [run.last - run.first for run in runs([4, 4], [40, 40])] == [4, 4]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card on which long prompts from their first token on take cuDNN's kernel."""
    monkeypatch.setattr(cuda_prompt, "has_square_kernel", lambda device: True)


@pytest.mark.usefixtures("hopper")
def test_a_long_prompt_is_padded_to_a_prepared_length() -> None:
    """With slots of its own last key, so that no value is read that was never written."""
    (run,) = runs([1030], [1030])
    assert (run.padded, run.n_keys, run.longest) == (1536, 1536, (1030, 1030))
    assert run.slots is not None
    assert run.slots[1029:].unique().tolist() == [8 * (1029 // 4) + 1029 % 4]
    (run,) = plan_attention_cuda(
        [1024], [1024], [list(range(3, 259))], BLOCK, torch.device("cpu")
    ).prompts
    assert (run.padded, run.slots, run.start) == (1024, None, 12)


@pytest.mark.usefixtures("hopper")
def test_only_equal_prompts_without_padding_are_one_batch() -> None:
    found = runs([1024] * 3 + [2048, 1500, 1500, 70, 30], [1024] * 3 + [2048, 1500, 1500, 70, 60])
    assert [(run.count, run.padded) for run in found] == [
        (3, 1024),
        (1, 2048),
        (1, 1536),
        (1, 1536),
        (2, 0),
    ]


@pytest.mark.usefixtures("hopper")
def test_chunks_behind_cached_tokens_and_windows_take_flash_attention() -> None:
    assert [run.padded for run in runs([1024], [1040])] == [0]
    assert [run.padded for run in runs([1024, 1024], [1024, 1024], window=4096)] == [0]
    assert [run.padded for run in runs([1023], [1023])] == [0]


def test_consecutive_blocks_are_read_where_they_lie() -> None:
    plan = plan_attention_cuda([3], [11], [[5, 6, 7]], BLOCK, torch.device("cpu"))
    (run,) = plan.prompts
    assert (run.slots, run.start, run.n_keys, run.longest) == (None, 20, 11, (3, 11))
    plan = plan_attention_cuda([3], [11], [[5, 7, 6]], BLOCK, torch.device("cpu"))
    assert plan.prompts[0].slots is not None
    assert plan.prompts[0].slots.tolist() == [20, 21, 22, 23, 28, 29, 30, 31, 24, 25, 26]


def test_keys_before_every_row_s_window_are_not_read() -> None:
    """The first of three rows is position 8 and sees 6..8 under a window of three."""
    (run,) = runs([3], [11], window=3)
    assert run.slots is not None
    assert run.slots.tolist() == [10, 11, 16, 17, 18]
    assert run.n_keys == 5
    (lone,) = plan_attention_cuda([3], [11], [[5, 6, 7]], BLOCK, torch.device("cpu"), 3).prompts
    assert (lone.slots, lone.start, lone.n_keys) == (None, 26, 5)
