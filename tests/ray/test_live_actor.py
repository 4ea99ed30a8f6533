"""The actor itself: attach, post, events, and eviction step by step, with a client of our own."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.core.params import SamplingParams
from engine_actor.messages import (
    PROTOCOL_VERSION,
    Beat,
    Cancel,
    Evict,
    Flag,
    Limit,
    StepBatch,
    Submit,
    decode_batch,
    encode_messages,
)
from tests.ray.conftest import Live

pytestmark = pytest.mark.ray

PROMPT = tuple(range(5, 45))


class Client:
    """A client of the engine actor, as an ingress is one, but synchronous."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine, self.name, self._seq = engine, name, 0
        self.batches: list[StepBatch] = []
        self.attached = self._get(engine.attach.remote(name, PROTOCOL_VERSION))
        self._stream = engine.events.remote(name, self.attached["epoch"], 0)

    def post(self, *messages: Any) -> list[tuple[int, str]]:
        self._seq += 1
        encoded = encode_messages(list(messages))
        seq, rejected, _ = self._get(self._engine.post.remote(self.name, self._seq, encoded))
        assert seq == self._seq
        return [tuple(item) for item in rejected]

    def read(self) -> StepBatch:
        """The next batch; renews the lease."""
        self.batches.append(decode_batch(self._get(next(self._stream))))
        if len(self.batches) % 50 == 0:
            self.post(Beat())
        return self.batches[-1]

    def read_until_ended(self, rids: set[int]) -> None:
        """Read until each of these has ended."""
        ended = set()
        while not rids <= ended:
            batch = self.read()
            ended |= {
                rid
                for rid, flag in zip(batch.rids, batch.flags, strict=True)
                if flag not in (Flag.RUNNING, Flag.REQUEUED)
            }

    def tokens(self, rid: int) -> list[int]:
        found: list[int] = []
        for batch in self.batches:
            at = 0
            for owner, count in zip(batch.rids, batch.counts, strict=True):
                if owner == rid:
                    found += batch.tokens[at : at + count]
                at += count
        return found

    def ends(self, rid: int) -> list[tuple[int, Flag]]:
        """(number of the batch, flag) of each final flag of a request."""
        return [
            (index, flag)
            for index, batch in enumerate(self.batches)
            for owner, flag in zip(batch.rids, batch.flags, strict=True)
            if owner == rid and flag not in (Flag.RUNNING, Flag.REQUEUED)
        ]

    @staticmethod
    def _get(reference: Any) -> Any:
        import ray

        return ray.get(reference, timeout=60)


def submit(rid: int, max_tokens: int) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Submit(rid, (*PROMPT, 5 + rid), sampling)


def test_attach_post_and_events(live: Live):
    client = Client(live.engine(), "test-basic")
    assert client.attached["protocol"] == PROTOCOL_VERSION
    assert client.post(submit(1, 5), submit(2, 5)) == []
    client.read_until_ended({1, 2})
    assert [batch.seq for batch in client.batches] == list(range(len(client.batches)))
    assert len(client.tokens(1)) == len(client.tokens(2)) == 5
    assert [flag for _, flag in client.ends(1)] == [Flag.LENGTH]
    assert client.post(submit(3, 100_000)) == [(3, "context_length_exceeded")]


def test_a_stream_that_is_asked_for_again_loses_nothing(live: Live):
    """Rotation: a stream ends after max_items, the next begins where it ended."""
    import ray

    engine = live.engine()
    client = Client(engine, "test-rotation")
    client.post(submit(1, 60))
    seen = [client.read().seq for _ in range(5)]
    epoch = client.attached["epoch"]
    while not client.ends(1):
        for item in engine.events.remote(client.name, epoch, seen[-1] + 1, 7):
            client.batches.append(decode_batch(ray.get(item)))
            seen.append(client.batches[-1].seq)
            if client.ends(1):
                break
    assert seen == list(range(len(seen)))
    assert len(client.tokens(1)) == 60


def test_an_evicted_requests_blocks_are_back_within_one_step(live: Live):
    engine = live.engine()
    alone = Client(engine, "test-alone")
    for rid in range(1, 9):
        alone.post(submit(rid, 100))
        alone.read_until_ended({rid})

    client = Client(engine, "test-evict")
    client.post(*(submit(rid, 100 if rid != 4 else 3000) for rid in range(1, 9)))
    while len(client.tokens(8)) < 20:
        client.read()
    client.post(Evict(4, "admin"))
    client.read_until_ended(set(range(1, 9)))

    ((at, flag),) = client.ends(4)
    assert flag is Flag.OOM
    blocks = (len(PROMPT) + 1 + len(client.tokens(4))) // client.attached["block_tokens"]
    free_before = client.batches[at - 1].load.free_blocks
    free_after = client.batches[min(at + 1, len(client.batches) - 1)].load.free_blocks
    grown = 7 * 2  # the seven others may each have begun a block in those two steps
    assert free_after >= free_before + blocks - grown
    for rid in (1, 2, 3, 5, 6, 7, 8):
        assert client.tokens(rid) == alone.tokens(rid), rid
        assert [flag for _, flag in client.ends(rid)] == [Flag.LENGTH]
    live.wait_idle()


def test_limits_reach_the_engine_and_come_back(live: Live):
    client = Client(live.engine(), "test-limit")
    before = live.status()["queue"]
    assert client.post(Limit(max_num_seqs=3, prefill_chunk_tokens=16), submit(1, 1)) == []
    client.read_until_ended({1})
    changed = live.status()["queue"]
    assert (changed["max_num_seqs"], changed["prefill_chunk_tokens"]) == (3, 16)
    limits = {name: before[name] for name in ("max_num_seqs", "prefill_chunk_tokens")}
    client.post(Limit(**limits), submit(2, 1))
    client.read_until_ended({2})
    after = live.status()["queue"]
    assert after.pop("arrivals")[-1] > max(before.pop("arrivals"), default=0.0)
    assert after == {**before, "preemptions": changed["preemptions"]}


def test_a_cancel_that_overtakes_its_submit_wins(live: Live):
    client = Client(live.engine(), "test-overtaken")
    client.post(Cancel(7))
    client.post(submit(7, 3000))
    client.read_until_ended({7})
    assert [flag for _, flag in client.ends(7)] == [Flag.CANCELLED]
    live.wait_idle()


def test_the_actor_says_who_it_is(live: Live):
    assert live.actor("EngineActor", name_ends="::engine-0") is not None
    status = live.status()
    assert status["engine"] == "engine-0"
    assert status["heartbeat"]["alive"]
