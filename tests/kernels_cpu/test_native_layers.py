"""Whole decoder layers in one native call against the references of every part: scattered blocks
with poison in all that a row must not read, windows, norms on heads, long contexts, threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.op import attention_reference, plan_attention
from kernels.elementwise.op import (
    HeadLayout,
    rms_norm_reference,
    rotation_reference,
    silu_mul_reference,
)
from kernels.kv.op import write_kv_reference
from kernels.linear.cpu_native import CpuNative
from kernels.linear.reference import linear_reference
from kernels.native.layers import (
    NativeLayers,
    NativeLayerWeights,
    NativeShape,
    NativeStep,
    refuse_layers,
)
from kernels.native.library import NativeLibrary
from kernels.pack.packed_linear import PackedLinear
from tests.kernels_cpu.layers import random_layer
from tests.kernels_cpu.paged_batches import Batch, angles, batch_of, poisoned_cache

SHAPE = NativeShape(
    hidden=40,
    heads=6,
    kv_heads=2,
    head_dim=16,
    intermediate=72,
    block_tokens=4,
    window=None,
    eps=1e-5,
    query_scale=0.25,
)


@dataclass(frozen=True)
class Layer:
    """One layer's packed weights, side by side where there are several, and its norms."""

    qkv: tuple[PackedLinear, ...]
    o: PackedLinear
    gate_up: tuple[PackedLinear, ...]
    down: PackedLinear
    norms: dict[str, torch.Tensor]

    def native(self) -> NativeLayerWeights:
        """As the library takes it."""

        def prepared(parts: tuple[PackedLinear, ...]) -> list[object]:
            return [CpuNative().prepare(part, torch.float32) for part in parts]

        return NativeLayerWeights(
            prepared(self.qkv),
            prepared((self.o,))[0],
            prepared(self.gate_up),
            prepared((self.down,))[0],
            **self.norms,
        )


def small(n: int, k: int, seed: int, bias: bool = False) -> PackedLinear:
    """Weights of which sums stay near one."""
    layer = random_layer(n, k, seed=seed, bias=bias)
    assert layer.offsets is not None
    return replace(layer, scales=layer.scales * 0.3, offsets=layer.offsets * 0.3)


def layer_of(shape: NativeShape, seed: int, *, apart: bool = False, normed: bool = False) -> Layer:
    """Random weights; apart: q, k, v and gate, up in linears of their own."""
    queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outs = (queries, kv, kv) if apart else (queries + 2 * kv,)
    halves = (shape.intermediate,) * 2 if apart else (2 * shape.intermediate,)
    draw = torch.Generator().manual_seed(seed)
    widths = {"attn_norm": shape.hidden, "mlp_norm": shape.hidden}
    if normed:
        widths |= {"q_norm": shape.head_dim, "k_norm": shape.head_dim}
    return Layer(
        tuple(small(n, shape.hidden, seed + i, bias=apart) for i, n in enumerate(outs)),
        small(shape.hidden, queries, seed + 3),
        tuple(small(n, shape.hidden, seed + 4 + i) for i, n in enumerate(halves)),
        small(shape.hidden, shape.intermediate, seed + 6),
        {name: torch.rand(width, generator=draw) + 0.5 for name, width in widths.items()},
    )


def step_of(batch: Batch, shape: NativeShape = SHAPE) -> NativeStep:
    """The rows of a batch as the library takes them."""
    width = max(map(len, batch.blocks))
    tables = torch.tensor(
        [blocks + [0] * (width - len(blocks)) for blocks in batch.blocks], dtype=torch.int32
    )
    alone = batch.q_lens == [1] * len(batch.q_lens)
    return NativeStep(
        torch.tensor(batch.positions),
        torch.tensor(batch.slots),
        None if alone else torch.tensor(batch.sequences, dtype=torch.int32),
        tables,
        *angles(max(batch.kv_lens), shape.head_dim),
    )


def run_native(
    shape: NativeShape, layers: list[Layer], x: torch.Tensor, kv: list[torch.Tensor], batch: Batch
) -> torch.Tensor:
    """All layers in one call."""
    out = x.clone()
    native = NativeLayers(shape, [layer.native() for layer in layers])
    native.run(out, kv, step_of(batch, shape), 0, len(layers))
    return out


def run_reference(
    shape: NativeShape, layers: list[Layer], x: torch.Tensor, kv: list[torch.Tensor], batch: Batch
) -> torch.Tensor:
    """The same from the parts' definitions."""
    plan = plan_attention(
        batch.q_lens,
        batch.kv_lens,
        batch.blocks,
        shape.block_tokens,
        torch.device("cpu"),
        shape.window,
    )
    cos, sin = (t[batch.positions].unsqueeze(1) for t in angles(max(batch.kv_lens), shape.head_dim))
    heads, kv_heads = shape.heads, shape.kv_heads
    layout = HeadLayout(heads, kv_heads, shape.query_scale)

    def many(y: torch.Tensor, parts: tuple[PackedLinear, ...]) -> torch.Tensor:
        return torch.cat([linear_reference(y, part) for part in parts], -1)

    x = x.clone()
    for layer, cache in zip(layers, kv, strict=True):
        norms = layer.norms
        normed = rms_norm_reference(x, norms["attn_norm"], shape.eps)
        rows = many(normed, layer.qkv).view(len(x), -1, shape.head_dim)
        if "q_norm" in norms:
            q = rms_norm_reference(rows[:, :heads], norms["q_norm"], shape.eps)
            k = rms_norm_reference(rows[:, heads : heads + kv_heads], norms["k_norm"], shape.eps)
            rows = torch.cat((q, k, rows[:, heads + kv_heads :]), 1)
        rows = rotation_reference(rows, cos, sin, layout)
        write_kv_reference(cache, rows[:, heads:], batch.slots)
        x += linear_reference(attention_reference(rows[:, :heads], cache, plan).flatten(1), layer.o)
        normed = rms_norm_reference(x, norms["mlp_norm"], shape.eps)
        x += linear_reference(silu_mul_reference(many(normed, layer.gate_up)), layer.down)
    return x


def check(shape: NativeShape, layers: list[Layer], batch: Batch, seed: int = 0) -> torch.Tensor:
    """Native equals reference, in x and in every cache, to the rounding of activations."""
    rows = len(batch.positions)
    x = torch.randn(rows, shape.hidden, generator=torch.Generator().manual_seed(seed))
    caches = [poisoned_cache(shape, batch, seed + i) for i in range(len(layers))]
    theirs = [cache.clone() for cache in caches]
    got, want = run_native(shape, layers, x, caches, batch), x
    want = run_reference(shape, layers, x, theirs, batch)
    assert float((got - want).abs().max()) < 1e-3 * float(want.abs().max())
    for mine, other in zip(caches, theirs, strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
        error = (mine - other).nan_to_num().abs().max()
        assert float(error) < 1e-3 * float(other.nan_to_num().abs().max())
    return got


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_layers_equal_the_references(
    threads: int, window: int | None, apart: bool, normed: bool
) -> None:
    """Two layers, decodes beside a whole prompt and a later chunk, cache poisoned elsewhere."""
    shape = replace(SHAPE, window=window)
    layers = [layer_of(shape, seed, apart=apart, normed=normed) for seed in (0, 20)]
    check(shape, layers, batch_of([1, 5, 1, 3], [9, 5, 1, 14], shape.block_tokens))


@settings(max_examples=20, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20)), min_size=1, max_size=5),
    head_dim=st.sampled_from([8, 24, 64, 128]),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 3)]),
    hidden=st.sampled_from([32, 36, 72]),
    block_tokens=st.sampled_from([4, 16]),
    seed=st.integers(0, 100),
)
def test_any_shape(
    lens: list[tuple[int, int]],
    head_dim: int,
    heads: tuple[int, int],
    hidden: int,
    block_tokens: int,
    seed: int,
) -> None:
    shape = NativeShape(hidden, *heads, head_dim, 50, block_tokens, None, 1e-6, head_dim**-0.5)
    q_lens, kv_lens = [q for q, _ in lens], [q + before for q, before in lens]
    check(shape, [layer_of(shape, seed)], batch_of(q_lens, kv_lens, block_tokens, seed), seed)


@pytest.mark.parametrize("keys", [63, 64, 65, 130, 511, 513, 900])
def test_long_rows_are_cut_and_joined(threads: int, keys: int) -> None:
    """Below, at and above one tile of keys, and where runs grow beyond one tile."""
    shape = replace(SHAPE, block_tokens=16)
    check(shape, [layer_of(shape, 1)], batch_of([1], [keys], 16))


def test_a_row_is_the_same_bits_in_any_batch(threads: int) -> None:
    """Alone, beside others and as part of a chunk; with one thread or two."""
    layers = [layer_of(SHAPE, seed) for seed in (0, 20)]
    batch = batch_of([1, 5, 1, 3], [70, 5, 1, 14], SHAPE.block_tokens)
    x = torch.randn(10, SHAPE.hidden, generator=torch.Generator().manual_seed(4))
    caches = [poisoned_cache(SHAPE, batch) for _ in layers]
    whole = run_native(SHAPE, layers, x, caches, batch)
    for index in range(10):
        one = run_native(SHAPE, layers, x[index : index + 1], caches, batch.row(index))
        assert torch.equal(one[0], whole[index])


def test_a_part_of_the_layers_leaves_the_others_alone() -> None:
    """Layers 1..2 of three read and write their own caches."""
    layers = [layer_of(SHAPE, seed) for seed in (0, 20, 40)]
    batch = batch_of([1, 1], [3, 9], SHAPE.block_tokens)
    x = torch.randn(2, SHAPE.hidden)
    caches = [poisoned_cache(SHAPE, batch) for _ in layers]
    theirs = [cache.clone() for cache in caches]
    native = NativeLayers(SHAPE, [layer.native() for layer in layers])
    step = step_of(batch)
    got = x.clone()
    native.run(got, caches, step, 1, 3)
    want = run_native(SHAPE, layers[1:], x, theirs[1:], batch)
    assert torch.equal(got, want)
    assert torch.equal(caches[0].isnan(), theirs[0].isnan())
    native.run(got, caches, step, 2, 2)
    assert torch.equal(got, want)


def test_no_memory_is_said_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for more threads than any memory holds: an error of the call, and x and the cache are as
    they were. Asked for inside the team, the same would end the process."""
    monkeypatch.setattr(NativeLibrary, "threads", lambda self: 2**31 - 1)
    batch = batch_of([1, 1], [9, 9], SHAPE.block_tokens)
    kv = poisoned_cache(SHAPE, batch)
    before = kv.clone()
    x = torch.randn(2, SHAPE.hidden)
    wide = replace(SHAPE, intermediate=2**20)
    layers = [layer_of(SHAPE, 0).native()]
    with pytest.raises(MemoryError, match="no memory for the activations"):
        NativeLayers(wide, layers).run(x, [kv], step_of(batch), 0, 1)
    assert torch.equal(kv.nan_to_num(7.0), before.nan_to_num(7.0))


def test_a_broken_number_is_not_hidden() -> None:
    """NaN in a key makes the row that reads it NaN, and no other."""
    batch = batch_of([1, 1], [9, 9], SHAPE.block_tokens)
    kv = poisoned_cache(SHAPE, batch)
    kv[batch.blocks[0][0], 1] = torch.nan
    got = run_native(SHAPE, [layer_of(SHAPE, 0)], torch.randn(2, SHAPE.hidden), [kv], batch)
    assert bool(got[0].isnan().all())
    assert bool(got[1].isfinite().all())


def test_refusals() -> None:
    """Each names what misfits."""
    good = layer_of(SHAPE, 0).native()
    act_order = CpuNative().prepare(random_layer(40, 96, perm=True), torch.float32)
    assert refuse_layers(SHAPE, [good], torch.float32) is None
    assert refuse_layers(SHAPE, [good], torch.float16) == "the KV cache is not fp32"
    odd = replace(SHAPE, head_dim=12)
    assert refuse_layers(odd, [good], torch.float32) == "head_dim 12 is not a multiple of 8"
    other = replace(good, down=torch.nn.functional.linear)
    assert "another kernel" in (refuse_layers(SHAPE, [other], torch.float32) or "")
    assert "act-order" in (refuse_layers(SHAPE, [replace(good, o=act_order)], torch.float32) or "")
