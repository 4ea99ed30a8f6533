"""Prompts whose lengths a graph does not know: staged as in torch, attended as in the reference."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch

from kernels.attention.cuda import CudaAttention
from kernels.attention.gather import gather_slots
from kernels.attention.op import ATTENTION
from kernels.attention.static_prompts import static_prompts_cuda
from kernels.kv.stage_prompts import SEQUENCES, StagedPrompts, stage_prompts
from kernels.pack.int8_kv import Int8KV
from tests.kernels_gpu.paged import (
    BLOCK_TOKENS,
    Case,
    as_int8,
    expected,
    poisoned_cache,
    queries,
    ragged,
)

pytestmark = pytest.mark.gpu

CASES = {
    "one": ragged([64], [64]),
    "one behind cached keys": ragged([3], [500]),
    "a row": ragged([1], [77]),
    "some": ragged([17, 1, 40, 5], [17, 30, 140, 333]),
    "all places": ragged([12] * SEQUENCES, range(12, 12 + 9 * SEQUENCES, 9)),
    "a bucket's rows": ragged([60, 68], [60, 500]),
}
ROWS, KEYS, HEAD_DIM = 128, 1024, 64


def stage(to: StagedPrompts, case: Case, rotary: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Ids are drawn; rows, keys and blocks are the case's."""
    device = to.ids.device
    positions = [p for q, k in zip(case.q_lens, case.kv_lens, strict=True) for p in range(k - q, k)]
    ends = list(accumulate(case.q_lens))
    lists = [
        case.block_lists[next(i for i, e in enumerate(ends) if row < e)] for row in range(case.rows)
    ]
    slots = [
        blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS
        for p, blocks in zip(positions, lists, strict=True)
    ]
    width = max(map(len, case.block_lists))
    tables = [[*blocks, *[0] * (width - len(blocks))] for blocks in case.block_lists]
    ids = torch.arange(5, 5 + case.rows, device=device)
    stage_prompts(
        to,
        ids,
        torch.tensor(positions, device=device),
        torch.tensor(slots, device=device),
        torch.tensor(tables, dtype=torch.int32, device=device),
        (case.q_lens, case.kv_lens),
        BLOCK_TOKENS,
        (rotary[0].to(device), rotary[1].to(device)),
    )


@pytest.mark.parametrize("keys", [KEYS, 1000])
def test_staged_as_in_torch(keys: int) -> None:
    """One case after the other in the same memory."""
    draw = torch.Generator().manual_seed(keys)
    rotary = torch.randn(700, HEAD_DIM, generator=draw), torch.randn(700, HEAD_DIM, generator=draw)
    here, there = (
        StagedPrompts.empty(200, 2048, BLOCK_TOKENS, HEAD_DIM, torch.device(device))
        for device in ("cpu", "cuda")
    )
    for rows in (ROWS, 150):
        for name, case in CASES.items():
            wanted = here.first(rows, keys, BLOCK_TOKENS)
            made = there.first(rows, keys, BLOCK_TOKENS)
            stage(wanted, case, rotary)
            stage(made, case, rotary)
            for field in dataclasses.fields(StagedPrompts):
                got, want = getattr(made, field.name).cpu(), getattr(wanted, field.name)
                assert torch.equal(got, want), (name, field.name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slots_are_gathered(dtype: torch.dtype) -> None:
    """Bit for bit as in torch, codes as well."""
    for kv_heads, head_dim in ((2, 128), (1, 64), (5, 96)):
        kv = torch.randn(9, BLOCK_TOKENS, 2, kv_heads, head_dim, device="cuda").to(dtype)
        codes = as_int8(kv)
        for count in (1, 7, 300):
            slots = torch.randint(9 * BLOCK_TOKENS, (count,), dtype=torch.int32, device="cuda")
            assert torch.equal(gather_slots(kv, slots, dtype), kv.flatten(0, 1)[slots.long()])
            assert torch.equal(gather_slots(codes, slots, dtype), codes.tokens(slots, dtype))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("window", [None, 20, 5000])
@pytest.mark.parametrize("heads", [(16, 2), (4, 4)])
def test_one_graph_serves_every_case(
    heads: tuple[int, int], window: int | None, int8: bool
) -> None:
    """Captured over padding alone, then replayed over each; rows of padding are zeros."""
    device, attend = torch.device("cuda"), CudaAttention()
    rotary = torch.randn(700, HEAD_DIM), torch.randn(700, HEAD_DIM)
    staged = StagedPrompts.empty(ROWS, KEYS, BLOCK_TOKENS, HEAD_DIM, device)
    starts = staged.q_starts, staged.k_starts
    plan = static_prompts_cuda(ROWS, staged.key_slots, starts, BLOCK_TOKENS, window)
    blocks = max(case.n_blocks for case in CASES.values())
    q = torch.zeros(ROWS, heads[0], HEAD_DIM, dtype=torch.float16, device=device)
    cache = torch.zeros(
        blocks, BLOCK_TOKENS, 2, heads[1], HEAD_DIM, dtype=torch.float16, device=device
    )
    kv: torch.Tensor | Int8KV = as_int8(cache) if int8 else cache
    attend(q, kv, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, kv, plan)
    for name, case in CASES.items():
        filled = poisoned_cache(case, heads[1], HEAD_DIM, torch.float16)
        given: torch.Tensor | Int8KV = as_int8(filled) if int8 else filled
        if isinstance(kv, Int8KV):
            assert isinstance(given, Int8KV)
            kv.codes[: case.n_blocks] = given.codes
            kv.scales[: case.n_blocks] = given.scales
        else:
            assert isinstance(given, torch.Tensor)
            kv[: case.n_blocks] = given
        q.fill_(3.0)
        q[: case.rows] = queries(case.rows, heads[0], HEAD_DIM, torch.float16)
        stage(staged, case, rotary)
        graph.replay()
        want = expected(q[: case.rows], given, case, window)
        error = (out[: case.rows].cpu().float() - want).abs().max() / want.abs().max()
        assert error < ATTENTION.allowed("float16"), name
        assert not out[case.rows :].any(), name
