"""The engine killed, an ingress killed: who hears what, and when service is back."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from tests.ray.conftest import LEASE_S, MAX_NUM_SEQS, Live
from tests.ray.served import wait_until
from tests.ray.streams import open_stream, started_stream

pytestmark = pytest.mark.ray

ERROR_S = 2.0
SERVED_S = 10.0


def is_served(live: Live) -> bool:
    body = {"prompt": "hello", "max_tokens": 1}
    status, answer = live.served.post("/v1/completions", body)
    if status not in (200, 503):
        raise AssertionError((status, answer))
    if status == 503:
        assert answer["error"]["code"] == "unavailable", answer
    return status == 200


def test_a_killed_engine_answers_every_waiter_and_comes_back(live: Live):
    """Half of the requests run, half wait in the queue; all must hear of it within 2 s. Live limits
    reach the new engine as well.
    """
    live.wait_idle()
    live.handle.limit.remote(prefill_chunk_tokens=24).result()
    pid = live.actor("EngineActor").pid

    async def run() -> tuple[list[str | None], list[bool], float, float]:
        streams = [
            await started_stream(live.port, f"to be cut {i}", 3000) for i in range(MAX_NUM_SEQS)
        ]
        waiting = [await open_stream(live.port, f"queued {i}", 1) for i in range(MAX_NUM_SEQS)]
        await asyncio.to_thread(
            wait_until,
            lambda: live.status()["queue"]["waiting"] == MAX_NUM_SEQS,
            20,
            "a full queue",
        )
        begun = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*(stream.rest() for stream in streams))
        refusals = await asyncio.gather(*(stream.refusal() for stream in waiting))
        heard = time.monotonic() - begun
        assert set(refusals) == {(503, "unavailable")}
        await asyncio.to_thread(wait_until, lambda: is_served(live), 120, "service again", 0.05)
        served = time.monotonic() - begun
        errors = [stream.error for stream in streams]
        return errors, [stream.is_done for stream in streams], heard, served

    errors, done, heard, served = asyncio.run(run())
    assert errors == ["engine_restarted"] * MAX_NUM_SEQS
    assert all(done)
    assert live.actor("EngineActor").pid != pid
    assert live.status()["queue"]["prefill_chunk_tokens"] == 24
    live.handle.limit.remote(prefill_chunk_tokens=32).result()
    print(f"\nengine killed -> every waiter told {heard:.3f} s, served again {served:.1f} s")
    assert heard < ERROR_S
    loads = live.served.every(r"engine-0 loaded in ([\d.]+) s")
    assert len(loads) >= 2
    assert served < SERVED_S + float(loads[-1][1])
    live.wait_idle()


def test_a_killed_ingress_leaves_nothing_decoding(live: Live):
    """Ray does not cancel the dead caller's stream; the lease does (B-09)."""
    live.wait_idle()
    replica = live.actor("ServeReplica:default:Ingress")

    async def run() -> tuple[float, float]:
        streams = [await started_stream(live.port, f"orphan {i}", 3000) for i in range(4)]
        begun = time.monotonic()
        os.kill(replica.pid, signal.SIGKILL)
        await asyncio.gather(*(stream.rest() for stream in streams))
        told = time.monotonic() - begun
        assert not any(stream.is_done for stream in streams)
        await asyncio.to_thread(
            wait_until, lambda: live.status()["queue"]["running"] == 0, 30, "no orphan decoding"
        )
        return told, time.monotonic() - begun

    told, freed = asyncio.run(run())
    print(f"\ningress killed -> streams cut {told:.3f} s, orphans gone {freed:.1f} s")
    print(f"  (lease {LEASE_S:g} s)")
    live.wait_idle()
    wait_until(lambda: is_served(live), 120, "service again", 0.05)
