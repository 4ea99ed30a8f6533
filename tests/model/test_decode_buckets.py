"""Buckets of decode steps: the smallest that holds a batch, never one that does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_actor.model.decode_buckets import Bucket, DecodeBuckets
from engine_actor.model.decode_graphs import graph_bytes, static_bytes


def test_the_rows_and_contexts_of_a_large_engine() -> None:
    buckets = DecodeBuckets.up_to(128, 3000)
    assert buckets.rows == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    assert buckets.contexts == (512, 1024, 2048, 3000)
    assert len(buckets) == 48


def test_limits_between_the_steps_are_the_last_ones() -> None:
    buckets = DecodeBuckets.up_to(6, 100)
    assert buckets.rows == (1, 2, 4, 6)
    assert buckets.contexts == (100,)
    assert DecodeBuckets.up_to(500, 512).rows[-1] == 128


def test_batches_at_below_and_between() -> None:
    buckets = DecodeBuckets.up_to(64, 4096)
    assert buckets.of(1, 1) == Bucket(1, 512)
    assert buckets.of(3, 512) == Bucket(4, 512)
    assert buckets.of(9, 513) == Bucket(12, 1024)
    assert buckets.of(64, 4096) == Bucket(64, 4096)
    assert buckets.of(65, 10) is None
    assert buckets.of(1, 4097) is None
    assert buckets.of(0, 10) is None


@given(st.integers(1, 300), st.integers(1, 100_000), st.integers(0, 400), st.integers(1, 120_000))
def test_a_bucket_is_the_smallest_that_holds_the_batch(
    max_rows: int, max_context: int, rows: int, longest: int
) -> None:
    buckets = DecodeBuckets.up_to(max_rows, max_context)
    assert list(buckets.rows) == sorted(set(buckets.rows))
    assert list(buckets.contexts) == sorted(set(buckets.contexts))
    fitting = [
        Bucket(each, context)
        for each in buckets.rows
        for context in buckets.contexts
        if 1 <= rows <= each and longest <= context
    ]
    smallest = min(fitting, key=lambda bucket: (bucket.rows, bucket.context), default=None)
    assert buckets.of(rows, longest) == smallest
    inside = 1 <= rows <= min(max_rows, 128) and longest <= max_context
    assert (smallest is not None) == inside


def test_bytes_for_the_memory_plan() -> None:
    buckets = DecodeBuckets.up_to(4, 1024)
    # 4 rows of: 10 fp32 logits, a table of 64 blocks, cos and sin of 8, two i64 and one i32.
    assert static_bytes(buckets, 10, 16, 8) == 4 * (40 + 256 + 64 + 20)
    assert graph_bytes(buckets, 1000) == 4 * 1000 + 6 * 640 * 1024
