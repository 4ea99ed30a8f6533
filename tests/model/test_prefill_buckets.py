"""Shapes of small forwards of prompts: the smallest that has room, and what they take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_actor.model.prefill_buckets import KEYS, ROWS, PrefillBucket, PrefillBuckets
from engine_actor.model.prefill_graphs import GRAPH_BYTES, graph_bytes, static_bytes


def test_the_largest_are_what_a_chunk_and_the_contexts_can_be() -> None:
    buckets = PrefillBuckets.up_to(8192, 32_768, 8)
    assert (buckets.rows, buckets.keys) == (ROWS, KEYS)
    small = PrefillBuckets.up_to(100, 200, 8)
    assert small.rows == (16, 32, 64, 96, 100)
    assert small.keys == (1024, 1600)
    assert PrefillBuckets.up_to(8, 20, 8) == PrefillBuckets((8,), (160,), 8)


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(0, 600), st.integers(1, 5000))
def test_a_bucket_is_the_smallest_with_room(
    max_rows: int, max_context: int, rows: int, keys: int
) -> None:
    buckets = PrefillBuckets.up_to(max_rows, max_context, 8)
    assert list(buckets.rows) == sorted(set(buckets.rows))
    assert list(buckets.keys) == sorted(set(buckets.keys))
    fitting = [
        PrefillBucket(r, k) for r in buckets.rows for k in buckets.keys if rows <= r and keys <= k
    ]
    smallest = min(fitting, key=lambda bucket: (bucket.rows, bucket.keys), default=None)
    assert buckets.of(rows, keys, 3) == smallest
    assert buckets.of(rows, keys, 9) is None
    assert buckets.of(rows, keys, 0) is None


def test_bytes_for_the_memory_plan() -> None:
    buckets = PrefillBuckets((16, 32), (64, 128), 8)
    # 32 rows of cos and sin of 8 and two i64; 128 key slots; 8 prompts of 10 fp32 logits, a table
    # of 8 blocks, their last row and four numbers of 4 bytes.
    assert static_bytes(buckets, 10, 16, 8) == 32 * (64 + 16) + 4 * 128 + 8 * (40 + 32 + 24)
    assert graph_bytes(buckets, 1000) == 1000 + 4 * GRAPH_BYTES
