"""Paged attention on the GPU against the fp32 reference: ragged, windowed, INT8, replayed."""

from __future__ import annotations

import pytest
import torch

from kernels.attention.cuda import (
    ABSENT,
    CudaAttention,
    CudaPlan,
    DecodeTensors,
    plan_attention_cuda,
)
from kernels.attention.op import ATTENTION
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

ATTEND = CudaAttention()
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def plan(case: Case, window: int | None) -> CudaPlan:
    return plan_attention_cuda(
        case.q_lens, case.kv_lens, case.block_lists, BLOCK_TOKENS, torch.device("cuda"), window
    )


def run(
    case: Case,
    heads: int,
    kv_heads: int,
    head_dim: int,
    name: str,
    int8: bool = False,
    window: int | None = None,
) -> float:
    """Largest error relative to the largest reference value."""
    q = queries(case.rows, heads, head_dim, DTYPES[name])
    kv: torch.Tensor | Int8KV = poisoned_cache(case, kv_heads, head_dim, DTYPES[name])
    if int8:
        assert isinstance(kv, torch.Tensor)
        kv = as_int8(kv)
    got = ATTEND(q, kv, plan(case, window))
    want = expected(q, kv, case, window)
    assert got.shape == want.shape
    assert got.dtype == q.dtype
    return float((got.cpu().float() - want).abs().max() / want.abs().max())


LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 250, 511, 513, 900)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_decoded_rows_of_any_length(head_dim: int, name: str, int8: bool) -> None:
    case = ragged([1] * len(LENGTHS), LENGTHS)
    assert run(case, 16, 2, head_dim, name, int8) < ATTENTION.allowed(name)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (28, 4), (16, 2), (24, 2)])
def test_any_group_of_heads(heads: int, kv_heads: int) -> None:
    """One to eight query heads a KV head in one tile, twelve in two."""
    case = ragged([1] * 4, [1, 40, 300, 77])
    for int8 in (False, True):
        assert run(case, heads, kv_heads, 128, "float16", int8) < ATTENTION.allowed("float16")


@pytest.mark.parametrize("window", [1, 7, 16, 33, 256, 10_000])
def test_sliding_window(window: int) -> None:
    case = ragged([1, 1, 1, 5, 200], [3, 64, 700, 30, 500])
    for int8 in (False, True):
        error = run(case, 8, 2, 64, "float16", int8, window)
        assert error < ATTENTION.allowed("float16")


def test_long_contexts_take_many_splits() -> None:
    case = ragged([1, 1, 1], [20_000, 5, 4097])
    for int8 in (False, True):
        assert run(case, 4, 1, 128, "bfloat16", int8) < ATTENTION.allowed("bfloat16")


@pytest.mark.parametrize("longest", [16, 400, 1024])
def test_keys_beyond_the_longest_that_was_planned_for(longest: int) -> None:
    """Right, if slow: the last split takes them, and leaves the rooms as they were."""
    case = ragged([1] * 4, [3000, longest, longest + 1, 7])
    for int8 in (False, True):
        q = queries(case.rows, 16, 128, torch.float16)
        kv: torch.Tensor | Int8KV = poisoned_cache(case, 2, 128, torch.float16)
        kv = as_int8(kv) if int8 and isinstance(kv, torch.Tensor) else kv
        step = plan(case, None).decode
        assert step is not None
        short = DecodeTensors(step.tables, step.lengths, step.rows, longest)
        got = torch.empty(case.rows, 16 * 128, dtype=torch.float16, device="cuda")
        want = expected(q, kv, case, None)
        for _ in range(2):
            ATTEND.decode(q, kv, short, got, BLOCK_TOKENS, None)
            error = (got.cpu().float() - want).abs().max() / want.abs().max()
            assert error < ATTENTION.allowed("float16")
            assert all((room == ABSENT).all() for room in short.rooms.values())


def test_prompts_chunks_and_decodes_together() -> None:
    """A whole prompt, chunks behind cached blocks, and decodes between them."""
    case = ragged([1, 70, 1, 33, 16], [90, 70, 5, 333, 16])
    for name in DTYPES:
        for int8 in (False, True):
            assert run(case, 14, 2, 128, name, int8) < ATTENTION.allowed(name)


@pytest.mark.parametrize("q_lens", [[1040], [1031] * 3, [1024, 1024, 1025], [1, 1040, 1040, 1]])
def test_long_prompts_from_their_first_token_on(q_lens: list[int]) -> None:
    """Of one length they may take another library's kernel than ragged ones."""
    case = ragged(q_lens, [700 if q_len == 1 else q_len for q_len in q_lens])
    for name in DTYPES:
        for int8 in (False, True):
            assert run(case, 8, 2, 128, name, int8) < ATTENTION.allowed(name)
    for window in (100, 4096):
        error = run(case, 4, 2, 64, "float16", window=window)
        assert error < ATTENTION.allowed("float16")


def test_a_prompt_in_consecutive_blocks_is_read_where_it_lies() -> None:
    for q_len, kv_len in ((1024, 1024), (64, 700)):
        count = -(-kv_len // BLOCK_TOKENS)
        case = Case((q_len,), (kv_len,), (tuple(range(3, 3 + count)),), count + 5)
        assert plan(case, None).prompts[0].slots is None
        for int8 in (False, True):
            assert run(case, 8, 2, 128, "float16", int8) < ATTENTION.allowed("float16")
            error = run(case, 8, 2, 128, "float16", int8, window=100)
            assert error < ATTENTION.allowed("float16")


def test_scores_far_apart() -> None:
    """Online softmax where the highest score comes last, and where all others vanish."""
    case = ragged([1], [600])
    kv = poisoned_cache(case, 1, 64, torch.float16)
    q = queries(1, 8, 64, torch.float16)
    block, offset = divmod(599, BLOCK_TOKENS)
    kv[case.block_lists[0][block], offset, 0, 0] = q[0, 0] * 1000
    got = ATTEND(q, kv, plan(case, None))
    want = expected(q, kv, case, None)
    assert (got.cpu().float() - want).abs().max() < 3e-3 * want.abs().max()


def test_a_graph_is_replayed_with_other_lengths_and_blocks() -> None:
    """Captured at the longest; no partial sums are left by a replay; padding gives zeros."""
    cases = [
        ragged([1] * 5, lens, seed)
        for seed, lens in enumerate(
            ([900, 3, 64, 500, 17], [16, 900, 1, 33, 2], [4, 5, 6, 899, 64])
        )
    ]
    n_blocks = max(case.n_blocks for case in cases)
    width = -(-900 // BLOCK_TOKENS)
    step = DecodeTensors(
        torch.zeros(6, width, dtype=torch.int32, device="cuda"),
        torch.zeros(6, dtype=torch.int32, device="cuda"),
        None,
        900,
    )
    held = CudaPlan((), (), (), BLOCK_TOKENS, None, step)
    q = torch.empty(6, 16, 128, dtype=torch.float16, device="cuda")
    kv = torch.empty(n_blocks, BLOCK_TOKENS, 2, 2, 128, dtype=torch.float16, device="cuda")
    ATTEND(q.zero_(), kv.zero_(), held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ATTEND(q, kv, held)
    for case in cases:
        q.copy_(queries(6, 16, 128, torch.float16))
        kv.fill_(torch.nan)
        kv[: case.n_blocks] = poisoned_cache(case, 2, 128, torch.float16)
        step.lengths.copy_(torch.tensor([*case.kv_lens, 0]))
        step.tables.zero_()
        for i, blocks in enumerate(case.block_lists):
            step.tables[i, : len(blocks)] = torch.tensor(blocks)
        for _ in range(2):
            out.fill_(torch.nan)
            graph.replay()
            want = expected(q[:5], kv, case, None)
            assert (out[:5].cpu().float() - want).abs().max() < 3e-3 * want.abs().max()
            assert not out[5].any()
            assert all((room == ABSENT).all() for room in step.rooms.values())


def test_repeated_launches_give_equal_bits() -> None:
    """The splits meet in any order and are added in one."""
    case = ragged([1] * 8, [3000] * 8)
    kv, q = poisoned_cache(case, 2, 128, torch.float16), queries(8, 16, 128, torch.float16)
    first = ATTEND(q, kv, plan(case, None))
    for _ in range(20):
        assert torch.equal(ATTEND(q, kv, plan(case, None)), first)
