"""A plan for prompts whose lengths change under a captured graph: flash attention reads where each
begins on the device, so one graph serves every batch that has room in it.
"""

from __future__ import annotations

import torch

from kernels.attention.cuda import CudaPlan
from kernels.attention.cuda_prompt import PromptRun


def static_prompts_cuda(
    rows: int,
    key_slots: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    block_tokens: int,
    window: int | None = None,
) -> CudaPlan:
    """For all of `rows` rows. key_slots i32[K]: of the sequences' keys, one behind the other, and
    anything behind them. starts i32[S + 1] each: of every sequence's rows and keys, the last one's
    end behind them; the rows of one without keys become zeros. Their content may change.
    """
    keys, count = len(key_slots), len(starts[0]) - 1
    run = PromptRun(count, 0, rows, keys, 0, key_slots, starts, (rows, keys))
    return CudaPlan((), (), (), block_tokens, window, None, (run,))
