"""Shapes of small forwards of prompts: the smallest that has room, and what they take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_actor.model.prefill_buckets import (
    BURST_KEYS,
    BURST_ROWS,
    KEYS,
    LONGEST,
    ROWS,
    PrefillBucket,
    PrefillBuckets,
)
from engine_actor.model.prefill_graphs import GRAPH_BYTES, graph_bytes, static_bytes
from kernels.attention.cuda_prompt import SQUARE_ROWS


def test_the_largest_are_what_a_chunk_and_the_contexts_can_be() -> None:
    buckets = PrefillBuckets.up_to(512, 32_768, 8)
    assert (buckets.rows, buckets.keys, buckets.burst_rows) == (ROWS, KEYS, ())
    small = PrefillBuckets.up_to(100, 200, 8)
    assert small.rows == (16, 32, 64, 96, 100)
    assert small.keys == (1024, 1600)
    assert PrefillBuckets.up_to(8, 20, 8) == PrefillBuckets((8,), (160,), 8)


def test_larger_ones_for_bursts() -> None:
    buckets = PrefillBuckets.up_to(8192, 32_768, 8)
    assert (buckets.rows, buckets.keys) == (ROWS, KEYS)
    assert (buckets.burst_rows, buckets.burst_keys) == (BURST_ROWS, BURST_KEYS)
    assert PrefillBuckets.up_to(1100, 600, 8).burst_rows == (768, 1024, 1100)
    assert PrefillBuckets.up_to(1100, 600, 8).burst_keys == 4800
    assert PrefillBuckets.up_to(520, 600, 8).burst_rows == (520,)
    assert buckets.of(4 * 512, 4 * 512, 4, 512) == PrefillBucket(2048, BURST_KEYS)
    assert buckets.of(513, 513, 1, 513) == PrefillBucket(768, BURST_KEYS)
    assert buckets.of(1025, 8192, 2, 1000) == PrefillBucket(1280, BURST_KEYS)
    assert buckets.of(1025, 8193, 2, 1000) is None
    assert buckets.of(2049, 2049, 4, 600) is None


def test_a_long_prompt_is_left_to_the_attention_that_is_faster_for_it() -> None:
    buckets = PrefillBuckets.up_to(2048, 32_768, 8)
    assert LONGEST == SQUARE_ROWS - 1
    assert buckets.of(2 * LONGEST, 2 * LONGEST, 2, LONGEST) is not None
    assert buckets.of(SQUARE_ROWS, SQUARE_ROWS, 1, SQUARE_ROWS) is None


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(0, 2200), st.integers(1, 9000))
def test_a_bucket_is_the_smallest_with_room(
    max_rows: int, max_context: int, rows: int, keys: int
) -> None:
    buckets = PrefillBuckets.up_to(max_rows, max_context, 8)
    for sizes in (buckets.rows, buckets.keys, buckets.burst_rows):
        assert list(sizes) == sorted(set(sizes))
    made = list(buckets)
    assert len(made) == len(set(made)) == len(buckets)
    assert max(made, key=lambda bucket: (bucket.rows, bucket.keys)) == made[0]
    assert made[0].rows == buckets.most_rows
    assert max(bucket.keys for bucket in made) == buckets.most_keys
    # A small forward of many keys does not become a large one.
    few = rows <= buckets.rows[-1]
    fitting = [
        bucket
        for bucket in made
        if rows <= bucket.rows and keys <= bucket.keys and (bucket.rows in buckets.rows) == few
    ]
    smallest = min(fitting, key=lambda bucket: (bucket.rows, bucket.keys), default=None)
    assert buckets.of(rows, keys, 3, 100) == smallest
    assert buckets.of(rows, keys, 9, 100) is None
    assert buckets.of(rows, keys, 0, 100) is None


def test_bytes_for_the_memory_plan() -> None:
    buckets = PrefillBuckets((16, 32), (64, 128), 8)
    # 32 rows of cos and sin of 8 and two i64; 128 key slots; 8 prompts of 10 fp32 logits, a table
    # of 8 blocks, their last row and four numbers of 4 bytes.
    assert static_bytes(buckets, 10, 16, 8) == 32 * (64 + 16) + 4 * 128 + 8 * (40 + 32 + 24)
    assert graph_bytes(buckets, 1000) == 1000 + 4 * GRAPH_BYTES
    burst = PrefillBuckets((16, 32), (64, 128), 8, (48,), 256)
    assert static_bytes(burst, 10, 16, 8) == 48 * (64 + 16) + 4 * 256 + 8 * (40 + 64 + 24)
    assert graph_bytes(burst, 1000) == 1000 + 5 * GRAPH_BYTES
