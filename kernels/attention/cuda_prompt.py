"""Rows of prompts over everything before them and themselves, through torch's own kernels.

Prompts whose rows follow each other share one call. Their keys are gathered once a layer, a copy as
long as they are; where a lone prompt's blocks follow each other the cache is read as it lies. The
causal rule and the sliding window are the kernel's own, aligned to the last row and the last key:
flash attention's. cuDNN's is twice as fast on Hopper, but knows only prompts from their first
token on, all of one length, and takes 40 ms to prepare for a length: long prompts are padded to one
of a few, which `prepare_lengths` can meet before anybody waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby

import numpy as np
import torch

from kernels.attention.gather import gather_slots
from kernels.attention.op import Segment, on_device
from kernels.pack.int8_kv import Int8KV
from kernels.spec.device import device_info

JOINED_KEYS = 4
"""Keys for each row of a forward that prompts may have together in one call: what is gathered then
stays below what the MLP of so many rows takes. Longer contexts go one by one, which also lets the
kernel split their keys among multiprocessors."""
SQUARE_ROWS = 1024
"""Rows of a prompt from which cuDNN is the faster one, padding included."""
SQUARE_STEP = 512
"""Lengths that it is prepared for are multiples of this."""
SQUARE_SM = 90


@dataclass(frozen=True, slots=True)
class PromptRun:
    """One call: rows first..last-1 of `count` prompts. slots: of its keys, i32 on the device; None
    where they are the cache's slots from `start` on. starts: of each prompt's rows and keys,
    i32[count + 1] each, None for a single prompt and for cuDNN. longest: rows and keys of any of
    them. padded: to so many rows and keys each, for cuDNN; 0 where the call is flash attention's.
    """

    count: int
    first: int
    last: int
    n_keys: int
    start: int
    slots: torch.Tensor | None
    starts: tuple[torch.Tensor, torch.Tensor] | None
    longest: tuple[int, int]
    padded: int = 0


def prompt_runs(
    segments: Sequence[Segment], block_tokens: int, device: torch.device, is_windowed: bool
) -> tuple[PromptRun, ...]:
    """The calls for those segments that have several rows; they are given in the order of rows."""
    rows = sum(segment.q_len for segment in segments)
    square = not is_windowed and has_square_kernel(device)
    return tuple(
        _run(prompts, block_tokens, device, square)
        for prompts in _calls(segments, JOINED_KEYS * rows, square)
    )


@cache
def has_square_kernel(device: torch.device) -> bool:
    """Whether cuDNN's attention is there and made for the card."""
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        return False
    return device_info(device).sm >= SQUARE_SM


def _calls(segments: Sequence[Segment], most_keys: int, square: bool) -> Iterator[list[Segment]]:
    """Neighbouring prompts that share a call."""
    for is_prompt, neighbours in groupby(segments, lambda segment: segment.q_len > 1):
        joined: list[Segment] = []
        for segment in neighbours if is_prompt else ():
            if joined and not _joins(joined, segment, most_keys, square):
                yield joined
                joined = []
            joined.append(segment)
        if joined:
            yield joined


def _joins(joined: list[Segment], segment: Segment, most_keys: int, square: bool) -> bool:
    """Whether a prompt goes into its neighbours' call: up to most_keys keys together, but those for
    cuDNN only where no row of padding would lie between them.
    """
    if square and (_is_square(segment) or _is_square(joined[-1])):
        is_alike = _is_square(segment) and joined[-1].kv_len == segment.q_len == joined[-1].q_len
        return is_alike and segment.q_len % SQUARE_STEP == 0
    return sum(map(_n_keys, joined)) + _n_keys(segment) <= most_keys


def _is_square(segment: Segment) -> bool:
    return segment.q_len == segment.kv_len and segment.q_len >= SQUARE_ROWS


def _run(
    prompts: list[Segment], block_tokens: int, device: torch.device, square: bool
) -> PromptRun:
    first, last = prompts[0].first_row, prompts[-1].first_row + prompts[-1].q_len
    keys = [_n_keys(prompt) for prompt in prompts]
    longest = max(prompt.q_len for prompt in prompts), max(keys)
    padded = 0
    if square and _is_square(prompts[0]):
        padded = -(-longest[0] // SQUARE_STEP) * SQUARE_STEP
    if len(prompts) == 1:
        blocks, skip = prompts[0].blocks, prompts[0].skip
        if padded in (0, keys[0]) and _follow(blocks):
            start = blocks[0] * block_tokens + skip
            return PromptRun(1, first, last, keys[0], start, None, None, longest, padded)
        found = _slots(prompts[0], block_tokens)
        if padded:
            # Any finite value does: no row of the prompt sees it.
            found = torch.cat((found, found[-1:].expand(padded - keys[0])))
        slots = on_device(found, device)
        return PromptRun(1, first, last, len(found), 0, slots, None, longest, padded)
    q_starts = [0, *accumulate(prompt.q_len for prompt in prompts)]
    k_starts = [0, *accumulate(keys)]
    counts = torch.tensor(q_starts + k_starts, dtype=torch.int32)
    found = torch.cat((counts, *(_slots(prompt, block_tokens) for prompt in prompts)))
    packed, count = on_device(found, device), len(prompts)
    starts = packed[: count + 1], packed[count + 1 : len(counts)]
    slots = packed[len(counts) :]
    return PromptRun(count, first, last, k_starts[-1], 0, slots, starts, longest, padded)


def _n_keys(segment: Segment) -> int:
    return segment.kv_len - segment.skip


def _follow(blocks: tuple[int, ...]) -> bool:
    if blocks[-1] - blocks[0] != len(blocks) - 1:
        return False
    return all(block == blocks[0] + place for place, block in enumerate(blocks))


def _slots(segment: Segment, block_tokens: int) -> torch.Tensor:
    """i32 of the keys that any of its rows sees, on the host."""
    firsts = np.array(segment.blocks, dtype=np.int32) * np.int32(block_tokens)
    slots = (firsts[:, np.newaxis] + np.arange(block_tokens, dtype=np.int32)).ravel()
    return torch.from_numpy(slots[segment.skip : segment.kv_len])


def attend_prompts(
    q: torch.Tensor, kv: torch.Tensor | Int8KV, run: PromptRun, window: int | None
) -> torch.Tensor:
    """The run's rows, [rows, heads, head_dim]; q [T, heads, head_dim], scaled."""
    queries, seen = q[run.first : run.last], _keys(kv, run, q.dtype)
    if run.padded:
        return _square(queries, seen, run)
    keys, values, starts = seen[:, 0], seen[:, 1], run.starts
    if starts is None:
        # The call without starts may split the keys of few rows.
        queries, keys, values = queries.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
    is_cut = window is not None and run.longest[1] > window
    got: torch.Tensor = torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        *(starts or (None, None)),
        *run.longest,
        0.0,
        True,
        False,
        scale=1.0,
        window_size_left=window - 1 if is_cut and window is not None else None,
    )[0]
    return got.squeeze(0) if starts is None else got


def _square(queries: torch.Tensor, seen: torch.Tensor, run: PromptRun) -> torch.Tensor:
    """Through cuDNN; seen [count * padded, 2, kv_heads, head_dim]."""
    rows, total = queries.shape[0], run.count * run.padded
    if rows < total:
        wide = queries.new_empty(total, *queries.shape[1:])
        wide[:rows], wide[rows:] = queries, 0
        queries = wide
    keys, values = seen.unflatten(0, (run.count, -1)).unbind(2)
    got: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries.unflatten(0, (run.count, -1)).transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        None,
        False,
        0.0,
        True,
        False,
        scale=1.0,
    )[0]
    return got.transpose(1, 2).flatten(0, 1)[:rows]


def prepare_lengths(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    most_rows: int,
) -> None:
    """Meet every length of a lone prompt of up to most_rows rows, in the thread that will compute
    them: cuDNN's plans are a thread's own. Does nothing where that kernel is not used.
    """
    if not has_square_kernel(device):
        return
    for rows in range(SQUARE_ROWS, most_rows + SQUARE_STEP, SQUARE_STEP):
        queries = torch.zeros(rows, heads, head_dim, dtype=dtype, device=device)
        seen = torch.zeros(rows, 2, kv_heads, head_dim, dtype=dtype, device=device)
        run = PromptRun(1, 0, rows, rows, 0, None, None, (rows, rows), rows)
        _square(queries, seen, run)


def _keys(kv: torch.Tensor | Int8KV, run: PromptRun, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values [keys, 2, kv_heads, head_dim]."""
    if run.slots is not None:
        return gather_slots(kv, run.slots, dtype)
    index = slice(run.start, run.start + run.n_keys)
    return kv.tokens(index, dtype) if isinstance(kv, Int8KV) else kv.flatten(0, 1)[index]
