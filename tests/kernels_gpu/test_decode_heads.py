"""Projected heads to attention in one launch against the two launches that it replaces."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import decode_heads
from kernels.attention.cuda import ABSENT, CudaAttention, CudaPlan, static_plan_cuda
from kernels.attention.decode_heads import DecodeHeads
from kernels.attention.op import ATTENTION
from kernels.kv.cuda import CudaStore, HeadCounts
from kernels.kv.op import HeadNorms
from kernels.pack.int8_kv import Int8KV
from tests.kernels_gpu.paged import BLOCK_TOKENS, Case, as_int8, poisoned_cache, ragged

pytestmark = pytest.mark.gpu

ATTEND, STORE = CudaAttention(), CudaStore()
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 250, 511, 513, 900, 0)


class Step:
    """A staged decode step over a cache that lacks the newest token of each row."""

    def __init__(
        self, lengths: tuple[int, ...], longest: int, queries: int, kv_heads: int, head_dim: int
    ) -> None:
        case = ragged([1] * len(lengths), [max(1, n) for n in lengths])
        self.case: Case = case
        self.queries, self.kv_heads, self.scale = queries, kv_heads, head_dim**-0.5
        tables = torch.zeros(len(lengths), -(-longest // BLOCK_TOKENS), dtype=torch.int32)
        slots = torch.full((len(lengths),), -1)
        for row, (length, blocks) in enumerate(zip(lengths, case.block_lists, strict=True)):
            tables[row, : len(blocks)] = torch.tensor(blocks)
            if length:
                block, offset = divmod(length - 1, BLOCK_TOKENS)
                slots[row] = blocks[block] * BLOCK_TOKENS + offset
        self.tables, self.slots = tables.cuda(), slots.cuda()
        self.lengths = torch.tensor(lengths, dtype=torch.int32).cuda()
        self.longest = longest
        angle = torch.randn(len(lengths), 1, head_dim // 2, device="cuda") * 10
        self.cos = torch.cat((angle.cos(),) * 2, -1)
        self.sin = torch.cat((-angle.sin(), angle.sin()), -1)

    def cache(self, head_dim: int, dtype: torch.dtype, int8: bool) -> torch.Tensor | Int8KV:
        """NaN in every slot without an older token, the newest one's too."""
        kv = poisoned_cache(self.case, self.kv_heads, head_dim, dtype)
        kv.view(-1, *kv.shape[2:])[self.slots[self.slots >= 0]] = torch.nan
        return as_int8(kv) if int8 else kv

    def plan(self, window: int | None) -> CudaPlan:
        return static_plan_cuda(self.tables, self.lengths, self.longest, BLOCK_TOKENS, window)

    def fused(
        self,
        heads: torch.Tensor,
        kv: torch.Tensor | Int8KV,
        norms: HeadNorms | None,
        window: int | None,
    ) -> torch.Tensor:
        plan = self.plan(window)
        run = DecodeHeads(self.cos, self.sin, plan, self.queries, self.kv_heads, self.scale)
        torch.cuda.synchronize()  # the kernel ahead must not be the one that fills the cache
        out = run(heads, kv, norms)
        assert plan.decode is not None
        assert all((room == ABSENT).all() for room in plan.decode.rooms.values())
        return out

    def twin(
        self,
        heads: torch.Tensor,
        kv: torch.Tensor | Int8KV,
        norms: HeadNorms | None,
        window: int | None,
    ) -> torch.Tensor:
        counts = HeadCounts(self.queries, self.kv_heads, self.scale)
        q = STORE.prepare(self.cos, self.sin, self.slots, counts)(heads, kv, norms)
        return ATTEND(q, kv, self.plan(window))


def tensors(kv: torch.Tensor | Int8KV) -> tuple[torch.Tensor, ...]:
    return (kv.codes, kv.scales) if isinstance(kv, Int8KV) else (kv,)


def copied(kv: torch.Tensor | Int8KV) -> torch.Tensor | Int8KV:
    made = [tensor.clone() for tensor in tensors(kv)]
    return Int8KV(*made) if isinstance(kv, Int8KV) else made[0]


def check(
    step: Step,
    head_dim: int,
    name: str,
    int8: bool,
    normed: bool = False,
    window: int | None = None,
) -> None:
    """Caches bit for bit; attention but for the order of the splits."""
    dtype, rows = DTYPES[name], len(step.lengths)
    heads = torch.randn(rows, step.queries + 2 * step.kv_heads, head_dim, device="cuda").to(dtype)
    weights = torch.rand(2, head_dim, device="cuda") + 0.5
    norms = HeadNorms(weights[0], weights[1], 1e-6) if normed else None
    one = step.cache(head_dim, dtype, int8)
    other = copied(one)
    want = step.twin(heads, other, norms, window)
    for _ in range(2):  # what was written is written again
        got = step.fused(heads, one, norms, window)
        scale = want.float().abs().max()
        assert (got.float() - want.float()).abs().max() / scale < ATTENTION.allowed(name)
        for mine, theirs in zip(tensors(one), tensors(other), strict=True):
            assert torch.equal(mine.nan_to_num(99), theirs.nan_to_num(99))
        assert not got[step.lengths == 0].any()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_rows_of_any_length(head_dim: int, name: str, int8: bool) -> None:
    check(Step(LENGTHS, 1024, 16, 2, head_dim), head_dim, name, int8)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("queries", "kv_heads"), [(1, 1), (4, 4), (28, 4), (24, 2)])
def test_any_group_of_heads(queries: int, kv_heads: int, int8: bool) -> None:
    """One to eight query heads a KV head in one tile; with twelve, one of two writes the token."""
    step = Step((1, 40, 300, 77, 0, 129), 512, queries, kv_heads, 128)
    check(step, 128, "float16", int8)
    check(step, 128, "bfloat16", int8, normed=True)


@pytest.mark.parametrize("window", [1, 16, 33, 256, 10_000])
def test_sliding_window(window: int) -> None:
    step = Step((3, 64, 700, 513), 1024, 8, 2, 64)
    for int8 in (False, True):
        check(step, 64, "float16", int8, window=window)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("lengths", "longest"), [((20_000,), 32_768), ((4097, 9000) * 8, 16_384), ((900,) * 70, 1024)]
)
def test_many_rounds_and_splits(lengths: tuple[int, ...], longest: int, int8: bool) -> None:
    """By the longest that a graph is for, while the shares follow each row's own length."""
    check(Step(lengths, longest, 16, 2, 128), 128, "float16", int8)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("clusters", [False, True])
def test_splits_meet_in_clusters_or_outside(
    monkeypatch: pytest.MonkeyPatch, clusters: bool, int8: bool
) -> None:
    """Each number of splits, some of them without tiles."""
    monkeypatch.setattr(decode_heads, "CLUSTER_UNITS", 1000 if clusters else 0)
    for longest in (512, 400, 1024, 2048):
        check(Step((290, 1, 0, 400), longest, 28, 4, 128), 128, "float16", int8)
    check(Step(LENGTHS, 1024, 16, 2, 128), 128, "bfloat16", int8, normed=True)
