"""How paged decode attention is cut into blocks: a pure function of lengths and card."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.cuda import (
    FEW_WARPS,
    HEAD_DIMS,
    HEADS_AT_ONCE,
    MOST_SPLITS,
    WARPS,
    CudaAttention,
    Split,
    split_of,
    variant,
)
from kernels.attention.decode_heads import CLUSTER_UNITS, MOST_IN_CLUSTER, splits_in_cluster
from kernels.attention.op import ATTENTION
from kernels.spec.op import OpKey


@pytest.mark.parametrize(
    ("tiles", "units", "kv_bits", "split"),
    [
        (1, 2, 16, Split(1, 8)),
        (16, 2, 8, Split(16, 8)),
        (32, 2, 16, Split(8, 8)),  # one sequence of 512 tokens: four blocks a KV head
        (512, 2, 16, Split(16, 8)),
        (128, 128, 16, Split(128, 8)),  # as many pairs as multiprocessors: nothing is split
        (128, 128, 8, Split(128, 16)),
        (32, 128, 8, Split(16, 8)),
        (1024, 16, 16, Split(128, 8)),
        (8192, 4, 16, Split(256, 8)),
        (512, 256, 8, Split(512, 8)),  # more pairs than multiprocessors: two blocks on each
    ],
)
def test_known_cases(tiles: int, units: int, kv_bits: int, split: Split) -> None:
    """Measured on an H200 of 132 multiprocessors."""
    assert split_of(tiles, units, 132, kv_bits) == split


@given(
    tiles=st.integers(1, 70_000),
    units=st.integers(1, 600),
    multiprocessors=st.integers(1, 150),
    kv_bits=st.sampled_from([8, 16]),
)
def test_a_batch_runs_in_one_wave(
    tiles: int, units: int, multiprocessors: int, kv_bits: int
) -> None:
    """Never more blocks than places unless every sequence already has a block of its own."""
    split = split_of(tiles, units, multiprocessors, kv_bits)
    assert split.tiles >= 1
    assert split.warps in (8, WARPS[kv_bits])
    splits = -(-tiles // split.tiles)
    places = multiprocessors * WARPS[kv_bits] // split.warps
    assert splits <= MOST_SPLITS
    assert splits == 1 or splits * units <= places


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_weights_of_the_most_splits_fit_where_the_sums_were(head_dim: int) -> None:
    """fp32 each: a weight and a total of every split and head (split_softmax.cuh)."""
    for kv_bits in WARPS:
        given = variant(head_dim, kv_bits, 0, warps=FEW_WARPS)
        assert given.shared_bytes >= 4 * 2 * MOST_SPLITS * HEADS_AT_ONCE


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"dtype": "bfloat16", "bits": 8}, None),
        ({"device": "cpu"}, "runs on a GPU only"),
        ({"dtype": "float32"}, "computes in half precision, not float32"),
        ({"k": 80}, "heads of 80 are not among (64, 96, 128)"),
        ({"n": 8}, "blocks of 8 tokens are not whole tiles of 16"),
        ({"exact": True}, "sums depend on how a sequence is split"),
    ],
)
def test_what_it_refuses(change: dict[str, object], why: str | None) -> None:
    key = {"op": ATTENTION.name, "device": "cuda", "dtype": "float16", "n": 16, "k": 128}
    assert CudaAttention().refuse(OpKey(**(key | change))) == why  # type: ignore[arg-type]


class Card:
    """Holds so many clusters at once, whatever their size."""

    def __init__(self, clusters: int) -> None:
        self.clusters = clusters

    def clusters_at_once(self, threads: int, cluster: int) -> int:
        assert (threads, 1 < cluster <= MOST_IN_CLUSTER) == (256, True)
        return self.clusters


@pytest.mark.parametrize(
    ("clusters", "splits", "sequences", "expect"),
    [
        (7, 4, 7, 4),
        (7, 4, 8, 1),
        (40, 4, CLUSTER_UNITS, 4),
        (40, 4, CLUSTER_UNITS + 1, 1),
        (15, 8, 2, 8),
        (15, 9, 2, 1),
        (66, 1, 2, 1),
        (0, 4, 2, 1),
    ],
)
def test_splits_of_few_sequences_are_a_cluster_where_all_clusters_fit(
    clusters: int, splits: int, sequences: int, expect: int
) -> None:
    """One that had to wait for another would take twice as long: 11.8 for 7.3 us at 16 rows."""
    assert splits_in_cluster(Card(clusters), 256, splits, sequences) == expect
