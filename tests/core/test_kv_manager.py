"""KV blocks of sequences: sharing, eviction, collisions, shrinking."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine_actor.core.kv_manager import KVManager
from engine_actor.core.params import SamplingParams
from engine_actor.core.sequence import Sequence as Request

BLOCK = 4


def request(tokens: Sequence[int], salt: str = "", prompt_logprobs: int | None = None) -> Request:
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Request(("c", 1), list(tokens), sampling, len(tokens), 0.0, salt=salt)


def compute(kv: KVManager, seq: Request) -> int:
    """Admit and compute all tokens; returns how many came from the cache."""
    cached = kv.match(seq)
    assert kv.grow(seq, len(seq.tokens))
    seq.n_computed = seq.n_scheduled = len(seq.tokens)
    kv.register(seq)
    return cached


def cached_after(kv: KVManager, seq: Request) -> int:
    """Tokens of `seq` that the cache has now."""
    cached = kv.match(seq)
    kv.release(seq)
    return cached


def test_only_full_blocks_are_shared_and_their_ids_are_the_same() -> None:
    kv = KVManager(8, BLOCK)
    first, second = request(range(10)), request([*range(8), 90, 91])
    assert compute(kv, first) == 0
    assert compute(kv, second) == 8
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    kv.check([first, second])
    kv.release(first)
    kv.release(second)
    assert (kv.n_free, kv.n_cached) == (8, 2)
    kv.check([])


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block() -> None:
    """B-05: at least one token is left, since its logits are wanted."""
    kv = KVManager(8, BLOCK)
    first = request(range(12))
    compute(kv, first)
    kv.release(first)
    again = request(range(12))
    assert compute(kv, again) == 8
    assert again.n_cached <= len(again.tokens) - 1
    kv.check([again])


def test_a_block_computed_twice_replaces_the_idle_one_so_the_chain_goes_on() -> None:
    """B-05: the last block of a cached prompt is computed anew; what follows is cached as well."""
    kv = KVManager(8, BLOCK)
    compute(kv, first := request(range(8)))
    kv.release(first)
    again = request(range(8))
    compute(kv, again)
    kv.check([again])
    again.tokens.extend(range(50, 54))
    kv.grow(again, 12)
    again.n_computed = again.n_scheduled = 12
    kv.register(again)
    kv.check([again])
    kv.release(again)
    assert kv.n_cached == 3
    assert cached_after(kv, request([*range(8), 50, 51, 52, 53, 9])) == 12


def test_a_block_computed_twice_at_once_stays_private() -> None:
    kv = KVManager(8, BLOCK)
    first, twin = request(range(8)), request(range(8))
    for seq in (first, twin):
        kv.match(seq)
        kv.grow(seq, 8)
        seq.n_computed = seq.n_scheduled = 8
    kv.register(first)
    kv.register(twin)
    kv.check([first, twin])
    kv.release(twin)
    assert kv.n_cached == 0
    kv.release(first)
    assert kv.n_cached == 2


def test_salts_never_share() -> None:
    kv = KVManager(8, BLOCK)
    compute(kv, first := request(range(9), salt="a"))
    kv.release(first)
    assert cached_after(kv, request(range(9), salt="b")) == 0
    assert cached_after(kv, request(range(9))) == 0
    assert cached_after(kv, request(range(9), salt="a")) == 8


def test_a_request_that_scores_its_prompt_writes_the_cache_and_does_not_read_it() -> None:
    kv = KVManager(8, BLOCK)
    compute(kv, first := request(range(9), prompt_logprobs=0))
    kv.release(first)
    assert cached_after(kv, request(range(9), prompt_logprobs=0)) == 0
    assert cached_after(kv, request(range(9))) == 8


@pytest.mark.parametrize("n_digests", [1, 2, 5])
def test_a_digest_collision_costs_a_miss_and_never_gives_a_wrong_block(n_digests: int) -> None:
    def weak(parent: bytes, tokens: Sequence[int]) -> bytes:
        return bytes([(sum(parent) + sum(tokens)) % n_digests])

    kv = KVManager(64, BLOCK, digest=weak)
    content: dict[int, tuple[int, ...]] = {}
    for start in range(0, 12, 3):
        for order in (1, -1):
            tokens = [*[*range(start, start + 8)][::order], 99]
            seq = request(tokens)
            compute(kv, seq)
            for index, block in enumerate(seq.blocks[:2]):
                prefix = tuple(tokens[: (index + 1) * BLOCK])
                if index < seq.n_cached // BLOCK:
                    assert content[block] == prefix
                content[block] = prefix
            kv.check([seq])
            kv.release(seq)


def test_a_colliding_parent_is_not_followed() -> None:
    """Equal digest and tokens of a block do not do: every token before it must be equal."""
    kv = KVManager(16, BLOCK, digest=lambda parent, tokens: bytes([tokens[0]]))
    compute(kv, first := request([0, 1, 2, 3, 5, 6, 7, 8, 0]))
    compute(kv, other := request([9, 1, 2, 3, 5, 6, 7, 8, 0]))
    again = request([9, 1, 2, 3, 5, 6, 7, 8, 0])
    assert kv.match(again) == 4
    assert again.blocks == other.blocks[:1]
    kv.check([first, other, again])


def test_the_oldest_idle_prefix_is_evicted_first_and_leaves_before_roots() -> None:
    kv = KVManager(6, BLOCK)
    for base in (0, 100, 200):
        compute(kv, seq := request(range(base, base + 8)))
        kv.release(seq)
    assert cached_after(kv, request(range(9))) == 8  # the first is now the newest
    big = request(range(300, 312))
    assert kv.grow(big, 12)
    kv.check([big])
    assert cached_after(kv, request([*range(100, 108), 1])) == 0
    assert cached_after(kv, request([*range(200, 208), 1])) == 4
    assert cached_after(kv, request(range(9))) == 8


def test_grow_that_does_not_fit_changes_nothing() -> None:
    kv = KVManager(4, BLOCK)
    compute(kv, idle := request(range(8)))
    kv.release(idle)
    seq = request(range(20, 28))
    assert not kv.grow(seq, 5 * BLOCK)
    assert (seq.blocks, kv.n_free, kv.n_cached) == ([], 4, 2)
    assert kv.grow(seq, 4 * BLOCK)
    assert kv.n_free == 0


def test_release_is_refused_while_a_work_is_in_flight() -> None:
    """B-10: a kernel may still write these blocks."""
    kv = KVManager(4, BLOCK)
    compute(kv, seq := request(range(8)))
    seq.in_flight = 1
    with pytest.raises(RuntimeError, match="in flight"):
        kv.release(seq)
    assert len(seq.blocks) == 2


def test_a_shrink_forgets_the_cached_tail_and_all_that_builds_on_it() -> None:
    kv = KVManager(6, BLOCK)
    compute(kv, held := request(range(100, 112)))
    compute(kv, seq := request(range(12)))
    kv.release(held)
    kv.release(seq)  # blocks 3, 4, 5
    kv.resize(4)
    kv.check([])
    assert (kv.n_free, kv.n_cached, kv.extent) == (4, 4, 4)
    assert cached_after(kv, request([*range(12), 9])) == 4
    kv.resize(6)
    kv.check([])
    assert kv.n_free == 6


def test_blocks_held_above_a_smaller_capacity_leave_with_their_sequence() -> None:
    kv = KVManager(6, BLOCK)
    compute(kv, low := request(range(8)))
    compute(kv, high := request(range(50, 62)))
    kv.resize(3)
    kv.check([low, high])
    assert (kv.holds_tail(low), kv.holds_tail(high)) == (False, True)
    assert kv.n_free == 0
    kv.release(high)
    kv.check([low])
    assert (kv.n_free, kv.n_cached, kv.extent) == (1, 1, 3)  # block 2 stays cached


def test_reset_forgets_everything_but_takes_no_block_from_its_holder() -> None:
    kv = KVManager(6, BLOCK)
    compute(kv, held := request(range(8)))
    compute(kv, idle := request(range(50, 58)))
    kv.release(idle)
    kv.reset_prefix_cache()
    kv.check([held])
    assert (kv.n_cached, kv.n_free, len(held.blocks)) == (0, 4, 2)
    held.tokens.extend(range(4))
    kv.grow(held, 12)
    held.n_computed = held.n_scheduled = 12
    kv.register(held)
    kv.release(held)
    kv.check([])
    assert kv.n_cached == 0


def test_events_are_net_changes_since_the_last_call() -> None:
    kv = KVManager(2, BLOCK)
    compute(kv, first := request(range(8)))
    kv.release(first)
    assert kv.take_events() == (tuple(first.block_hashes), ())
    assert kv.take_events() == ((), ())
    compute(kv, second := request(range(50, 58)))
    added, evicted = kv.take_events()
    assert added == tuple(second.block_hashes)
    assert set(evicted) == set(first.block_hashes)
    kv.release(second)
    compute(kv, third := request(range(8)))
    kv.release(third)
    compute(kv, request(range(50, 58)))
    assert kv.take_events() == ((), ())


def test_without_a_prefix_cache_nothing_is_hashed_or_kept() -> None:
    kv = KVManager(4, BLOCK, prefix_cache=False)
    compute(kv, seq := request(range(12)))
    kv.release(seq)
    assert (seq.block_hashes, kv.n_cached, kv.n_free) == ([], 0, 4)
    assert cached_after(kv, request(range(12))) == 0


def test_a_pool_needs_block_tokens() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        KVManager(4, 0)
